"""The fork server: a process that has imported what services need, and is forked for each of them.

Services that are forked start without importing, which takes many seconds for vLLM.

    circusd ─► launcher, one a watcher ──── unix socket ────► fork server, one a server
                    │ exit pipe, pidfd                           │ fork
                    └──────────────────────────────────► the service's process

The fork server (`python -m dynamo_local.process.forkserver`) imports and forks, and does nothing else: one thread, no
event loop, no bus. circus starts the launcher. The launcher asks for a fork, hands over its environment and its output,
passes signals on, and ends as the fork ends. If no fork server answers, the launcher becomes the service itself, so
nothing depends on the fork server. If it dies, the next one is forked from a spare (spare.py) and imports nothing.

A fork outlives the fork server, but never its launcher.
"""
