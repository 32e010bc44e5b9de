"""What benchmarks share: servers and models to measure, the load on them, accounting of CPU time, statistics, tables.

Not here: a benchmark, or what only one family of them needs.
"""
