"""The bus: NATS for messages between the processes of a server, JetStream for what is kept.

`nats.Bus` is the one way to talk: `send` and `listen` for messages, `ask` and `serve` for requests, which a handler
answers with what it returns. `listen_each` and `serve_each` do so for all revisions of endpoints, and say which.
Calls of `@endpoint`s (rpc.py) and presence are built on it, and what is kept (jetstream/): the prefill queue and the
live settings. Subjects are named in core/subjects.py, messages are in core/messages.
"""
