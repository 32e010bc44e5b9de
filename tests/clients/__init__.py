"""Real clients, as their users write them, against one real server: `make clients`.

What belongs here: the clients and their environments (`recipes`, `environments`), the programs, which are those of
docs/guides/clients.md (`page`), the server that they ask (`server`), and the run and its report (`__main__`).

What does not: tests of the API itself (tests/e2e, tests/conformance).
"""
