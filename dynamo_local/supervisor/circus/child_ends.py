"""Has circusd notice at once that a child has ended. Stock circusd only looks at intervals (`check_delay`)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from circus.controller import Controller
from circus.exc import ConflictError
from circus.process import DEAD_OR_ZOMBIE, OTHER, Process

_CONFLICT_PAUSE_S = 0.02
"""Before another try: circusd cannot look at its processes while it starts or stops one."""


def look_when_children_end() -> None:
    """Patch circus, so that the circusd in this process looks at its processes on each SIGCHLD."""
    start = Controller.start

    def start_and_listen(controller: Any) -> None:
        start(controller)
        loop: asyncio.AbstractEventLoop = controller.loop.asyncio_loop
        loop.add_signal_handler(signal.SIGCHLD, _Looks(loop, controller.arbiter.manage_watchers).look)

    # As Any: mypy would object to the assignments.
    controller: Any = Controller
    process: Any = Process
    controller.start = start_and_listen
    process.status = property(_status_of(process.status.fget))


def _status_of(status: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have a process count as present until it is reaped, which publishes its end.

    Stock circus forgets a process that ends between two steps of one look without publishing anything. With this, the
    look that its SIGCHLD asks for finds and reaps it.
    """

    def until_reaped(process: Any) -> Any:
        seen = status(process)
        return OTHER if seen == DEAD_OR_ZOMBIE else seen

    return until_reaped


class _Looks:
    """Runs `manage` once after each call of `look`, or once after several that come during a run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manage: Callable[[], Awaitable[None]]) -> None:
        self._loop = loop
        self._manage = manage
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                await self._manage()
            except ConflictError:
                self._wanted = True
                await asyncio.sleep(_CONFLICT_PAUSE_S)
