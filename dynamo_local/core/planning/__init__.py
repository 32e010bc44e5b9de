"""Decides how many workers run: observations in, actions out. Pure.

    observation   the workers, their loads and the prefill queue at one pull
    window        the pulls of one adjustment interval, aggregated; a history of windows
    policies      propose for one role one more worker, one less, or neither
    proposals     what a policy returns
    decide        turns proposals into actions: budgets, minimums, role switches, the worker to remove
    decision      the actions of one interval, and the reasons
    actions       what can be done to workers
    recording     the port to whatever shows observations and decisions

What is unknown is None, never zero.
"""
