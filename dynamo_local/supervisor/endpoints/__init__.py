"""Endpoints within a running server: brings what runs to what is ordered of them.

    start.py         opens the registry when the server has started, and runs the controller
    controller.py    takes orders, and has a task for each endpoint
    orders.py        checks orders and writes them into the registry
    kept_registry.py the registry in memory and on disk
    endpoint.py      one endpoint: looks, asks core/endpoints/rollout.py what is next, and has it carried out
    revision.py      one revision of it: the steps that are carried out, and how they went
    observing.py     what there is of an endpoint's revisions: statefile, presences, free devices
    launch.py        from a spec to the resolved graph of a revision, with its model in place
    files.py         the files and streams of a revision
    turning.py       who yields its devices to whom, by core/endpoints/turns.py
    turn.py          what one endpoint lacks for its turn, and since when it has it
    keeping.py       schedules and forecasts that keep endpoints awake
    board.py         what frontends are told to serve

How processes are started and ended is in actuator/, what is ordered in state/registry.py.
"""
