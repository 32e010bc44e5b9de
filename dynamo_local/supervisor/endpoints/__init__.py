"""Endpoints within a running server: brings what runs to what is ordered of them.

    controller.py    opens the registry when the server has started, takes orders, and has a task for each endpoint
    parts.py         what endpoints and their revisions work with
    orders.py        checks orders and writes them into the registry
    kept_registry.py the registry in memory and on disk
    endpoint.py      an endpoint: looks, asks core/endpoints/rollout.py what is next, and has it carried out
    revisions/       a revision of it: launched, started, observed, parked and ended
    awake.py         whether it is awake: its use, orders, schedules and forecasts
    turns.py         who yields its devices to whom, by core/endpoints/turns.py
    record.py        what is done to endpoints, for the event log, the planner's recorders and commands
    board.py         what frontends are told to serve

How processes are started and ended is in actuator/, what is ordered in state/endpoints/registry.py.
"""
