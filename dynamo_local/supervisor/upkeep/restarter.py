"""Restarts watchers' processes when they end, as core.process.restarts decides. circus itself restarts nothing.

A watcher that is not to run, by the statefile, is left alone, and so is one that a change is under way of: the actuator
looks after it until the change is complete.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dynamo_local.core.errors import ConfigError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.process.restarts import GiveUp, LifeRecord, Restart, RestartLimits, became_ready, died
from dynamo_local.supervisor.circus.client import ACTIVE, STOPPED, ProcessBegan, ProcessEnded
from dynamo_local.supervisor.circus.daemon import describe_exit
from dynamo_local.supervisor.server.reports.logs import last_error, size, tail
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce, quote

_BUSY_INTERVAL_S = 0.25
"""Interval of looks while processes begin, end, or wait to be started again."""

_IDLE_INTERVAL_S = 2.0
"""Interval of looks while there are no events. An event may have been lost."""

_STATUS_FOLLOWS_S = 1.0
"""circus's status shows an event within this time."""

_LINES_SHOWN = 15


class Starter(Protocol):
    """The part of circus (CircusClient) that the restarter needs."""

    async def statuses(self) -> dict[str, str]: ...
    async def start(self, name: str) -> None: ...


class Events(Protocol):
    """Events of processes that begin and end (circus.events.EventStream)."""

    async def next(self) -> ProcessBegan | ProcessEnded: ...


@dataclass(frozen=True)
class RegisteredProcess:
    """A process as it has announced itself. Its pid differs from the one circus knows if it was forked
    (process/forkserver)."""

    pid: int
    lease: str


class ProcessRegistry(Protocol):
    """Tells which process belongs to a watcher, and whether it is to run."""

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        """The process that was heard last. Raises StateError or NotRunningError."""

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        """Record the end of a watcher's process. `pid`: as circus knew it; None if that is not known."""

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher's process is to be started again when it ends. Raises StateError or NotRunningError."""


@dataclass
class _Watched:
    """The restarter's memory of one watcher. `restart_at`: None while its process runs, or its end is not decided on;
    infinite if it was given up. `log_start`: where the log of its present process begins, in bytes. `start_recorded`:
    whether the start of its present process is among the events."""

    record: LifeRecord = field(default_factory=LifeRecord)
    restart_at: float | None = None
    exit_missed: bool = False
    log_start: int = 0
    start_recorded: bool = False


@dataclass
class Restarter:
    """Restarts the processes of one server.

    `quiet`: watchers whose processes announce no presence; they count as ready while they run. `expendable`: watchers
    that are left ended when they cannot be started, as nothing depends on them. So are the workers of endpoints: the
    others serve on. `all_expendable`: so are all, as on a node, which is not the whole of a graph. `record` is called
    with the event of each end, and of each start of a quiet watcher.
    """

    circus: Starter
    registry: ProcessRegistry
    log_file: Callable[[str], Path]
    report: Report
    quiet: Collection[str] = frozenset()
    expendable: Collection[str] = frozenset()
    all_expendable: bool = False
    limits: RestartLimits = field(default_factory=RestartLimits)
    clock: Callable[[], float] = time.monotonic
    record: Callable[[Event], None] = lambda _: None
    given_up: dict[str, str] = field(default_factory=dict, init=False)
    """Watchers of endpoints' workers that are left ended, each with the reason."""
    _watched: dict[str, _Watched] = field(default_factory=dict, init=False)
    _present: frozenset[str] = field(default=frozenset(), init=False)
    _ended: dict[str, ProcessEnded] = field(default_factory=dict, init=False)
    _event: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _event_at: float = field(default=-math.inf, init=False)
    _failure: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._failure = ReportOnce(self.report)

    def note_ready(self, watcher: str) -> None:
        """Note that the watcher's process has announced that it is ready."""
        watched = self._of(watcher)
        watched.record = became_ready(watched.record, self.clock())

    async def listen(self, events: Events) -> None:
        """Note which processes begin and end, and their exit codes, until cancelled."""
        while True:
            match await events.next():
                case ProcessEnded(watcher=watcher) as ended:
                    self._ended[watcher] = ended
                case ProcessBegan(watcher=watcher, pid=pid):
                    self._ended.pop(watcher, None)
                    for name in self.quiet:
                        if name.lower() == watcher:
                            self._record_start(name, pid)
            self._event_at = self.clock()
            self._event.set()

    def _record_start(self, name: str, pid: int | None = None) -> None:
        """Record the start of a process that announces no presence, once."""
        watched = self._of(name)
        if not watched.start_recorded:
            watched.start_recorded = True
            self.record(Event("start", "started", watcher=name, pid=pid))

    async def run(self) -> None:
        """Restart processes that end, until cancelled. Raises SupervisorError when a service is given up."""
        while True:
            self._event.clear()
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(_BUSY_INTERVAL_S if self._is_busy() else _IDLE_INTERVAL_S):
                    await self._event.wait()

    def _is_busy(self) -> bool:
        """Whether a process has just begun or ended, or waits to be started again."""
        if self.clock() - self._event_at < _STATUS_FOLLOWS_S:
            return True
        return any(each.exit_missed or each.restart_at not in (None, math.inf) for each in self._watched.values())

    async def look(self) -> None:
        """Look at every watcher once, and restart what is due."""
        statuses = await self.circus.statuses()
        self._forget(self._present - statuses.keys())
        self._present = frozenset(statuses)
        for name, status in statuses.items():
            if status == STOPPED:
                try:
                    await self._handle_stopped(name)
                except (NotRunningError, StateError) as error:
                    # The next round tries again.
                    self._failure.note(f"{name}  ended, and is started again when the statefile can be used: {error}")
            elif status == ACTIVE:
                self._note_running(name)

    def _note_running(self, name: str) -> None:
        watched = self._of(name)
        # The actuator may have started the next process meanwhile.
        watched.restart_at, watched.exit_missed = None, False
        self.given_up.pop(name, None)
        if name in self.quiet:
            self.note_ready(name)
            # circus may have told of it before this process listened.
            self._record_start(name)

    async def _handle_stopped(self, name: str) -> None:
        """Decide on a process that has ended, or start it again when its delay is over."""
        watched = self._of(name)
        if watched.restart_at is None:
            if self._exit_is_known(name, watched):
                await self._handle_end(name, watched)
        elif self.clock() >= watched.restart_at:
            wanted = await self.registry.wanted(name)
            watched.restart_at = None
            if wanted:
                watched.log_start = size(self.log_file(name))
                await self.circus.start(name)

    def _exit_is_known(self, name: str, watched: _Watched) -> bool:
        """Whether the exit code has come, or one look was spent on waiting for it.

        It travels on another socket than the status, and circus loses it if the process ends at an unlucky moment.
        """
        if name.lower() in self._ended or watched.exit_missed:
            return True
        watched.exit_missed = True
        return False

    async def _handle_end(self, name: str, watched: _Watched) -> None:
        """Record the end of a process, and decide whether and when it is started again."""
        registered = await self.registry.registered(name)
        if (await self.circus.statuses()).get(name) != STOPPED:
            # Another process runs by now, and `registered` may be that one.
            return
        ended = self._ended.get(name.lower())
        exit_code, pid = (ended.exit_code, ended.pid) if ended is not None else (None, None)
        await self.registry.ended(name, pid, registered)
        wanted = await self.registry.wanted(name)
        self._ended.pop(name.lower(), None)
        watched.exit_missed = watched.start_recorded = False
        if not wanted:
            return
        self._decide(name, watched, exit_code, pid)

    def _decide(self, name: str, watched: _Watched, exit_code: int | None, pid: int | None) -> None:
        """Decide on the restart of a process that has ended. Raises SupervisorError when its service is given up."""
        decision, watched.record = died(watched.record, exit_code, self.limits, self.clock())
        match decision:
            case Restart(at=at, delay_s=delay_s):
                watched.restart_at = at
                self._show(name, f"{describe_exit(exit_code)}, restart in {delay_s:g} s", self._last_lines(name))
                then = f"restart in {delay_s:g} s"
            case GiveUp(reason=reason):
                then = f"not restarted: {reason}"
        # A signal has no reason in the log.
        error = last_error(self._last_lines(name)) if exit_code is not None and exit_code > 0 else None
        what = f"ended: {describe_exit(exit_code)}{'' if error is None else f': {error}'}"
        self.record(Event("death", what, then, name, pid=pid, exit_code=exit_code))
        if isinstance(decision, GiveUp):
            self._give_up(name, watched, f"{decision.reason} ({describe_exit(exit_code)})")

    def _give_up(self, name: str, watched: _Watched, reason: str) -> None:
        if _is_of_an_endpoint(name):
            error = last_error(self._last_lines(name))
            self.given_up[name] = reason if error is None else f"{reason}: {error}"
        elif not self.all_expendable and name not in self.expendable:
            raise self._given_up(name, reason)
        watched.restart_at = math.inf
        self._show(name, f"{reason}, going on without it", self._last_lines(name))

    def _given_up(self, name: str, reason: str) -> SupervisorError:
        lines = self._last_lines(name)
        self._show(name, reason, lines)
        error = last_error(lines)
        cause = f"{name} {reason}" if error is None else f"{name} {reason}: {error}"
        return SupervisorError(cause, f"its log is {self.log_file(name)}")

    def _show(self, name: str, what: str, lines: Iterable[str]) -> None:
        self.report.step(f"{name}  ended: {what}")
        quote(self.report, lines)

    def _last_lines(self, name: str) -> list[str]:
        return tail(self.log_file(name), _LINES_SHOWN, after=self._of(name).log_start)

    def _forget(self, names: Iterable[str]) -> None:
        """Forget removed watchers. A later watcher of the same name starts without their record."""
        for name in names:
            self._watched.pop(name, None)
            self.given_up.pop(name, None)
            self._ended.pop(name.lower(), None)

    def _of(self, name: str) -> _Watched:
        return self._watched.setdefault(name, _Watched())


def _is_of_an_endpoint(name: str) -> bool:
    """Whether the server goes on without it. Workers that a graph has itself have no revision in their names."""
    try:
        return parse_watcher(name).revision != ""
    except ConfigError:
        # A user may have added watchers to circus.
        return False
