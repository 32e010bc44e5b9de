"""Asynchronous tasks: ordered by clients, kept on the disk, and asked for until each has its result."""
