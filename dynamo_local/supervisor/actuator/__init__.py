"""Changes of what runs: adding, removing and restarting workers, and finishing changes that were broken off.

A change is read from top to bottom in these files:

    actuators.py     makes the actuators of a server, by what `ports.py` asks for
    actuator.py      takes the lock on changes, finishes what is left, makes one change
    add.py, remove.py, restart.py    one kind of change each: its claim in the statefile, then its steps in circus
    steps.py         names the next steps of what earlier changes have left; pure
    unfinished.py    takes these steps

`commands.py` takes the orders of `dynamo scale`, `drain` and `restart`, and those of the planner (of the one that acts:
`acting_planner.py`), and makes their changes. `reconciler.py` finishes changes that were left half done. When to scale
is the planner's decision and not made here.
"""
