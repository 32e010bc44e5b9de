"""Decides how many workers run: observations in, actions out. Pure.

    window        the workers, their loads and the prefill queue at one pull; the pulls of one adjustment interval,
                  aggregated; a history of windows
    policies      propose for one role one more worker, one less, or neither
    proposals     what a policy returns, and the devices that workers hold
    decide        turns proposals into actions: budgets, minimums, role switches, the worker to remove
    decision      the actions of one interval, and the reasons; the port to whatever shows them
    actions       what can be done to workers

What is unknown is None, never zero.
"""
