"""The record of what runs: statefile, its locks, device inventory and allocation, and repair after a crash.

    statefile/              its contents, their pure changes, its atomic storage, its comparison with what runs
    endpoints/              the registry of endpoints, and the board
    devices/                which devices there are, which process gets which, and which server holds which
    machine/                processes, threads, cores, memory and listeners, by /proc
    paths, namespaces       where everything lies on disk
    files, locks            atomic files, and locks between processes
    record, remains         what a server writes of itself; what a killed one has left, and its removal

Starting or stopping services, circus, NATS, configuration and scaling decisions belong elsewhere. A module here imports
`dynamo_local.core`, the standard library, msgspec, and (lazily, in `devices/inventory`) NVML; nothing else. Every
call blocks, for milliseconds unless a lock is contended: call it from an event loop by `asyncio.to_thread`.
"""
