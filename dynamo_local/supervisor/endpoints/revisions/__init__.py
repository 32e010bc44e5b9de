"""A revision of an endpoint: launched, started, observed, parked and ended.

revision.py      its steps, and how they went
observing.py     what there is of it: statefile and presences
launch.py        from a spec to the resolved graph, with the model in place and its files checked; its files and streams
memory.py        memory for workers that start: what is given up for it, what would have to go
parking.py       has workers park and wake
"""
