"""vLLM's own tests of its API, run against this project's servers: `make conformance`.

What belongs here: fetching vLLM's source distribution (`sdist`), a copy of those of its tests that apply (`suite`, with
`shim_utils` and `shim_conftest` in place of vLLM's files), the servers that answer (`servers`), and the list of what
each test is expected to do (`expectations`, `expected.txt`).

What does not: any of vLLM's code, and tests of this project's own.
"""
