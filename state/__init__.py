"""The record of what runs: statefile, its locks, device inventory and allocation, and repair after a crash.

    model, transitions      the statefile's contents, and the pure changes of them
    store, files, locks     its atomic storage
    paths                   where everything lies on disk
    inventory, visible      which devices this machine has
    devices, holding        which process gets which device, and which server of the machine holds which
    processes, reconcile, remains    what a killed server or process has left, and its removal
    threads, cores          threads and CPU cores, for binding processes

Starting or stopping services, circus, NATS, configuration and scaling decisions belong elsewhere. A module here imports
`dynamo_local.core`, the standard library, msgspec, and (lazily, in `inventory`) NVML; nothing else. Every call blocks,
for milliseconds unless a lock is contended: call it from an event loop by `asyncio.to_thread`.
"""
