"""Tasks that keep a running server whole: restarts of processes, its files, its devices, CPU cores, orphaned processes.

What changes which workers run belongs in the actuator.
"""
