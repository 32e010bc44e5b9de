"""The node server: runs workers of a graph on a node of a cluster, as its head's server asks over the bus.

    __main__.py   `python -m dynamo_local.supervisor.node`: starts circusd beside its own imports
    head.py       what its head tells it: its order when it is started, and beats, without which it ends
    server.py     its life: the same machinery as a server's, without bus, API and planner
    places.py     its node as a place: plans of its own, and a statefile that it alone writes
    agent.py      the actor that a cluster with actors has it run by

A cluster (supervisor/places/cluster.py) starts one on each node where something is reserved. It ends on SIGTERM in
order, and otherwise with all its processes: when its parent or the process that it watches ends, when the bus or the
head is silent for too long, and when the head's server was replaced by another one.
"""
