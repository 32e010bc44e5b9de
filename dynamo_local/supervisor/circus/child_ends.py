"""circusd learns at once that a child has ended. By itself it only looks now and then (`check_delay`)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from circus.controller import Controller
from circus.exc import ConflictError
from circus.process import DEAD_OR_ZOMBIE, OTHER, Process

_CONFLICT_PAUSE_S = 0.02
"""circusd does one thing at a time: while it starts or stops a process, it cannot look."""


def look_when_children_end() -> None:
    """Have the circusd that is started in this process look after its processes at each SIGCHLD."""
    start = Controller.start

    def start_and_listen(controller: Any) -> None:
        start(controller)
        loop: asyncio.AbstractEventLoop = controller.loop.asyncio_loop
        loop.add_signal_handler(signal.SIGCHLD, _Looks(loop, controller.arbiter.manage_watchers).look)

    # Through names of no type: mypy sees no more than that something is assigned.
    controller: Any = Controller
    process: Any = Process
    controller.start = start_and_listen
    process.status = property(_status_of(process.status.fget))


def _status_of(status: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A process that has ended counts as there until it is reaped, which tells of its end. circus forgets one that ends
    between two steps of a look without a word; the look that its SIGCHLD asks for finds it now."""

    def until_reaped(process: Any) -> Any:
        seen = status(process)
        return OTHER if seen == DEAD_OR_ZOMBIE else seen

    return until_reaped


class _Looks:
    """Looks once for each call, or for several calls in a row."""

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
