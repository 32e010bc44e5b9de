"""`python -m dynamo_local.supervisor.circus.circusd < ORDER`: stock circusd with five changes.

- It imports first, and then reads what it is to do (ahead.py).
- Processes stay in circusd's session. circus makes each process the leader of a session of its own, and Linux shares a
  core among sessions first (sched_autogroup, on in most distributions). Where engines leave no core idle, processes
  that are awake for moments only, such as NATS, then wait up to half a second for their share. Engines, which compute,
  lead sessions of their own (process/ancestry.py).
- A signal ends circusd at once, without its processes: the server replaces it. Stock circusd would stop them all.
- circus and tornado get a clock that is never set back. By the wall clock they would look after no process until it has
  caught up.
- circusd notices at once that a process has ended (`look_when_children_end`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from circus.circusd import main
from circus.controller import Controller
from circus.exc import ConflictError
from circus.process import DEAD_OR_ZOMBIE, OTHER, Process
from circus.sighandler import SysHandler

from dynamo_local.process.ancestry import die_as_environment_says


def _lead_a_group() -> None:
    os.setpgid(0, 0)


def steady_clock() -> Callable[[], float]:
    """A replacement for `time.time` that starts at its value and then follows the monotonic clock."""
    set_at = time.time() - time.monotonic()
    return lambda: set_at + time.monotonic()


def _take_order() -> None:
    """Wait for the order, and do as it says. Ends this process if there is none: its parent needs no circusd."""
    order = json.loads(sys.stdin.buffer.read() or sys.exit(0))
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = [order["config"]]
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for number, opened in enumerate((nothing, log, log)):
        os.dup2(opened, number)


# circusd notices at once that a child has ended. Stock circusd only looks at intervals (`check_delay`).

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


if __name__ == "__main__":
    die_as_environment_says()
    # As Any: mypy would object to the assignments. circus calls setsid for its processes only, as it is no daemon here.
    module: Any = os
    module.setsid = _lead_a_group
    clocks: Any = time
    clocks.time = steady_clock()
    look_when_children_end()
    SysHandler.SIGNALS = []
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _take_order()
    main()
