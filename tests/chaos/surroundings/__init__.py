"""What is around a server: file systems with little room, the wall clock, its statefile. Not here: its processes."""
