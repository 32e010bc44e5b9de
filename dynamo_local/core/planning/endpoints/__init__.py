"""Decides how many workers each endpoint has: observations in, orders out. Pure.

    decision      the endpoints at one pull, the order of one endpoint and its reasons, the port to whatever shows them
    wants         what is remembered of an endpoint from pull to pull, and the number of workers that its policy asks
                  for, by role
    decide        turns observations into one decision for each endpoint, within one budget of devices for all of them
                  and the graph's own workers

Unlike for the graph's own workers, a decision is a number of workers, made at every pull. What is unknown is None,
never zero: it changes no number.
"""
