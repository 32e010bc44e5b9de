"""The bus: NATS for messages between the processes of a server, JetStream for what is kept.

`nats.Bus` is the one way to talk: `send` and `listen` for messages, `ask` and `serve` for requests and their answers.
Calls of `@endpoint`s (rpc.py) and presence are built on it, and what is kept (jetstream/): the prefill queue and the
live settings. Subjects are named in core/subjects.py, messages are in core/messages.
"""
