"""Changes of what runs: adding, removing and restarting workers, and finishing changes that were broken off.

A change is read from top to bottom in these files:

    commands.py     the orders of `dynamo scale`, `drain` and `restart`, which it plans, and of the planner that acts
    actuators.py    makes the actuators of a server, and has them finish changes that were left half done
    actuator.py     takes the lock on changes, finishes what is left, makes one change
    steps.py        names the next steps of what is left; pure
    changes.py      each kind of change: its claim in the statefile, then its steps at a place

When to scale is the planner's decision and not made here.
"""
