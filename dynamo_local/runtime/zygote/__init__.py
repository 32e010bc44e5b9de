"""A process that has imported what services need, and is forked for each of them: they start without importing it.

    circusd ─► launcher, one a watcher ──── unix socket ────► nursery, one a server
                    │ leash: two pipes, a pidfd                  │ fork
                    └──────────────────────────────────► the service's process

The nursery (`python -m dynamo_local.runtime.zygote`) imports and forks, and does nothing else: one thread, no event
loop, no bus. The launcher is what circus starts: it asks for a fork, hands it its environment and its output, passes
signals on, and ends as it ends. Without a nursery that serves it, it becomes the service itself, as if there were none:
nothing depends on the nursery.

Forks outlive the nursery, and never their launcher.
"""
