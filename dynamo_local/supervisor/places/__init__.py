"""Places: where the processes of a graph live. What the actuator decides is done there.

    port.py      what every place can do, and in which order it is asked
    local.py     this machine: devices in the statefile, processes under circusd
    capacity.py  what is free, on this machine or on the nodes of a cluster, for workers that are to start
    cluster.py   what a cluster is to do: reserve on its nodes, and start a node server there; clusters by name
    clustered.py the nodes of a cluster, and the head's machine, as the places of one graph; what is reserved there
    node_servers.py    which node servers stand there, and whether they answer
    far.py       places over the bus: the messages, who asks, who answers

What to add, remove and restart, and what is left half done, is decided above, in `actuator/` and by the planner. What a
process is started from is decided in `server/launch`.
"""
