"""Places: where the processes of a graph live. What the actuator decides is done there.

    port.py      what every place can do, and in which order it is asked
    local.py     this machine: devices in the statefile, processes under circusd
    machine.py   what `local.py` works through: circusd, the devices that servers hold
    books.py     the statefile, read and updated beside the event loop

What to add, remove and restart, and what is left half done, is decided above, in `actuator/` and by the planner. What a
process is started from is decided in `server/launch`.
"""
