"""A process that has imported what services need, and is forked for each of them: they start without importing it.

    circusd ─► launcher, one a watcher ──── unix socket ────► fork server, one a server
                    │ leash: two pipes, a pidfd                  │ fork
                    └──────────────────────────────────► the service's process

The fork server (`python -m dynamo_local.process.forkserver`) imports and forks, and does nothing else: one thread, no
event loop, no bus. circus starts the launcher: it asks for a fork, hands it its environment and its output, passes
signals on, and ends as the fork ends. Without a fork server that answers, the launcher becomes the service itself:
nothing depends on the fork server.

Forks outlive the fork server, and never their launcher.
"""
