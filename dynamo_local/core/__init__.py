"""Pure policies and protocols: names, errors, messages, request log, fleet view, routing.

What belongs here decides or describes; it does no I/O, reads no clock, draws no random numbers and imports no
third party but msgspec. Functions that depend on time take `now`. What talks to NATS, circus, vLLM or the file
system belongs in an adapter package above.
"""
