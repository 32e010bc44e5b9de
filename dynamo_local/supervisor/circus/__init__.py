"""circusd, which starts the processes of a server: its own process, its control endpoint, its events, its watchers, and
its replacement when it dies.

circus and zmq are imported here and nowhere else. When a process is started again, and what runs, is decided elsewhere
(upkeep/restarter.py, actuator).
"""
