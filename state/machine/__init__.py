"""What the machine has and runs, as /proc and the drivers tell: processes, threads, cores, memory, listeners."""
