"""Decides how many workers each endpoint has: observations in, orders out. Pure.

    observation   the endpoints, their workers, requests in flight and prefill queues at one pull
    demand        the highest demand of the last minutes
    memory        what is remembered of an endpoint from pull to pull
    wants         the number of workers that an endpoint's policy asks for, by role
    pools         an endpoint's workers of one role as the budget sees them
    budget        one budget of devices for all endpoints and the graph's own workers
    decide        turns observations into one decision for each endpoint
    decision      the order of one endpoint, and its reasons
    recording     the port to whatever shows observations and decisions

Unlike for the graph's own workers, a decision is a number of workers, made at every pull. What is unknown is None,
never zero: it changes no number.
"""
