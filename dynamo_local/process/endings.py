"""Waits for the ends of processes."""

from __future__ import annotations

import asyncio
import os


async def ended(pid: int) -> None:
    """Wait until that process of this machine has ended, reaped or not."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Readable as soon as the process has ended, also while nobody reaps it.
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
