"""Deciding how many workers there are: observation in, changes out. Pure.

    observation   what one pull has found
    window        what the pulls of one adjustment interval say together; a history of windows
    policies      what a role wants: one more worker, one less, or neither
    deciding      what comes of these wishes: budgets, minimums, role switches, who is to go
    changes       what can be changed, and the port to what does it
    recording     the port to whatever shows it

What is unknown is None, never zero.
"""
