"""Starts, keeps and stops the processes of one server on one box, with stock circus.

Here: the plan of watchers, circusd and its client, our NATS server, restarts, the ordered drain, log
files, and what `dynamo serve`, `ps`, `logs` and `stop` do. circus and zmq are known here and nowhere else.
What runs *inside* a service's process belongs in the runtime; what a terminal shows belongs in the cli.
"""
