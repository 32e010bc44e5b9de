"""The record of what runs: statefile, its locks, device inventory and allocation, and repair after a crash.

What belongs here: the statefile's model (`model`) and the pure moves on it (`transitions`), its atomic
storage (`store`, `files`, `locks`), where everything lies on disk (`paths`), what devices there are
(`inventory`), who gets which (`devices`) and who has which on the machine (`holding`), and what to do with
the remains of a server that was killed (`processes`, `reconcile`).

What does not: starting or stopping services, circus, NATS, configuration, scaling decisions. A module here
imports `dynamo_local.core`, the standard library, msgspec, and (lazily, in `inventory`) NVML; nothing else.
Every call blocks, for milliseconds unless a lock is contended; call it from an event loop with
`asyncio.to_thread`.
"""
