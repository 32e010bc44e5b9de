"""Faults at random under load, for as long as wanted: `python -m tests.chaos`, or `make chaos`.

Here: a graph, frontends that know the right answer to every request, and something that kills, stops and cuts.
What is checked: every request ends in the right tokens, each position once, or in a documented error; afterwards
nothing is left over. Not here: tests of single faults (tests/integration) and how long recovery takes (benchmarks).
"""
