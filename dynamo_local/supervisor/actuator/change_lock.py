"""Waiting for a lock file that another process holds, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from state.locks import FileLock, LockTimeoutError


@asynccontextmanager
async def turn_at(
    path: Path, look_every_s: float, busy: Callable[[LockTimeoutError, bool], None]
) -> AsyncIterator[None]:
    """Hold the lock, and remove its file in the end. The kernel ends it when the process dies.

    `busy` hears each time that it is another process's turn, and whether that is the first time. It may raise: then it
    is not waited for.
    """
    lock = FileLock(path)
    first = True
    while True:
        try:
            # Does not wait: a system call or two.
            lock.acquire(0.0)
            break
        except LockTimeoutError as error:
            busy(error, first)
        first = False
        await asyncio.sleep(look_every_s)
    try:
        yield
    finally:
        lock.release(remove=True)
