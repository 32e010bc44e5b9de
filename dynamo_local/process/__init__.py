"""What a process of the server stands on: the bus, its presence, its tasks, its parent, the host of a service.

NATS is known here and nowhere else. What starts and stops processes belongs in the supervisor.
"""
