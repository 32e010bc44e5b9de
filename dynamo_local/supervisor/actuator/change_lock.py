"""The lock on changes of what runs. Waiting for it blocks no event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dynamo_local.control.absence import why_absent
from dynamo_local.supervisor.server.reports.report import Report
from state.locks import FileLock, LockTimeoutError
from state.paths import StatePaths

_RETRY_S = 0.1


@asynccontextmanager
async def change_lock(
    paths: StatePaths, wait_s: float, report: Report, endpoint: str = "", clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[None]:
    """Be the only one that changes the workers of that endpoint, or, without one, the graph's own processes.

    Raises LockTimeoutError when another process holds the lock for longer than `wait_s`, SupervisorError when the
    server is only starting, or is stopping.
    """
    check_changeable(paths)
    give_up_at = clock() + wait_s

    def busy(error: LockTimeoutError, first: bool) -> None:
        if clock() >= give_up_at:
            raise error
        if first:
            report.step(f"waiting for a change that process {error.holder} makes")
        check_changeable(paths)

    async with hold_lock(paths.changes_lock_of(endpoint), _RETRY_S, busy):
        # The server may have ended while this process waited.
        check_changeable(paths)
        yield


def check_changeable(paths: StatePaths) -> None:
    """Raise SupervisorError unless the server is up and not ending."""
    if not paths.blueprint_file.exists():
        raise why_absent(paths)


@asynccontextmanager
async def hold_lock(
    path: Path, retry_s: float, on_busy: Callable[[LockTimeoutError, bool], None]
) -> AsyncIterator[None]:
    """Hold the lock file for the time of the context, then remove it. The kernel frees the lock of a process that dies.

    `on_busy` is called each time that another process holds the lock, and told whether it is the first time. It may
    raise, which ends the waiting.
    """
    lock = FileLock(path)
    first = True
    while True:
        try:
            # Does not wait: a system call or two.
            lock.acquire(0.0)
            break
        except LockTimeoutError as error:
            on_busy(error, first)
        first = False
        await asyncio.sleep(retry_s)
    try:
        yield
    finally:
        lock.release(remove=True)
