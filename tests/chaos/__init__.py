"""Random faults under load: `python -m tests.chaos`, or `make chaos`.

A run has a graph, frontends that know the right answer to every request, and an injector of faults. It checks that
every request ends in the right tokens, each position once, or in a documented error, and that nothing is left over
afterwards. Tests of single faults are in tests/integration, times of recovery in benchmarks.
"""
