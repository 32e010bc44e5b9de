"""Pure policies and protocols: names, errors, messages, request log, fleet view, routing, migration, planning.

The code here decides or describes. It does no I/O, reads no clock, draws no random numbers and imports no third party
but msgspec. Functions that depend on time take `now`. Code that talks to NATS, circus, vLLM or the file system belongs
in a package above.
"""
