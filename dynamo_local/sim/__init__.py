"""A fleet in virtual time: discrete events over the router's own policies and the mocker's own scheduler.

Here belong the clock of events, simulated workers, and what came of the requests. No wall clock, no asyncio, no I/O but
the reading of traces; equal inputs give equal results. What is compared, and printed, belongs to `benchmarks`.
"""
