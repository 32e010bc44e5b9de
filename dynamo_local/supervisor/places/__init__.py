"""Places: where the processes of a graph live. What the actuator decides is done there.

    port.py      what every place can do, and in which order it is asked
    local.py     this machine: devices in the statefile, processes under circusd
    machine.py   what `local.py` works through: circusd, the devices that servers hold
    cluster.py   what a cluster is to do: reserve on its nodes, and start a node server there
    clustered.py the nodes of a cluster, and the head's machine, as the places of one graph
    node_servers.py    which node servers stand there, and whether they answer
    slots.py     what is reserved with a cluster, by watcher
    far.py, service.py, messages.py    places over the bus: who asks, who answers, and the messages
    environments.py    clusters by name
    books.py     the statefile, read and updated beside the event loop

What to add, remove and restart, and what is left half done, is decided above, in `actuator/` and by the planner. What a
process is started from is decided in `server/launch`.
"""
