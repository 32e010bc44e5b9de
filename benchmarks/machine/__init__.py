"""What a server takes of its machine: time to start, CPU time when idle, memory of workers, cores beside others."""
