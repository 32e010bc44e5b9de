"""Decides how many workers each endpoint has: observations in, actions and orders out. Pure.

    window        the endpoints at one pull: workers, their loads, requests in flight, prefill queues; the pulls of one
                  adjustment interval, aggregated; a history of windows
    policies      propose for one role one more worker, one less, or neither (proposals: what they return)
    memory        what is kept of an endpoint from pull to pull, and the number of workers that its policy asks for
    steps         turns proposals into actions: budgets, minimums, role switches, the worker to remove
    decide        one decision for each endpoint at a pull, within one budget of devices for all, which is shared out
    decision      the changes and the reasons; the port to whatever shows them
    actions       what can be ordered, and what becomes of it

The endpoint `main`, which serves the graph's own model, is changed by actions, one at a time; the workers of all others
by their number. What is unknown is None, never zero: it changes nothing.
"""
