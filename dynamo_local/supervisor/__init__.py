"""Starts, keeps and stops the processes of one server on one machine, with stock circus.

    server/     one server, from its first file to its last process: plans, start-up, NATS, logs
    circus/     circusd, and how to talk to it
    upkeep/     tasks that keep the server whole while it runs
    actuator/   changes of what runs: adding, removing, restarting workers
    places/     where processes live: this machine, or the nodes of a cluster
    node/       the server of one node of a cluster
    admin/      what commands ask of a running server

What runs *inside* a service's process belongs in `process`; what a terminal shows belongs in `cli`.
"""
