"""Keeps watchers' processes running: sees them end, decides by core.restarts, starts them again.

circus restarts nothing by itself here. Watchers come and go while the server runs: one that is not meant to run, by the
statefile, is left alone, and so is one that only starts: whoever adds it looks after it until it is ready.
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

from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError
from dynamo_local.core.process.restarts import GiveUp, LifeRecord, Restart, RestartLimits, became_ready, died
from dynamo_local.supervisor.circus.client import ACTIVE, STOPPED
from dynamo_local.supervisor.circus.daemon import describe_exit
from dynamo_local.supervisor.circus.events import ProcessBegan, ProcessEnded
from dynamo_local.supervisor.server.logs import last_error, size, tail
from dynamo_local.supervisor.server.report import Report, quote

_LOOK_EVERY_S = 0.25
"""While processes begin, end, or wait to be started again."""

_LOOK_SELDOM_S = 2.0
"""While nothing is told of: what was told of may have been lost."""

_RECENTLY_S = 1.0
"""A status follows its event within this time."""

_LINES_SHOWN = 15


class Starter(Protocol):
    """What the keeper needs of circus."""

    async def statuses(self) -> dict[str, str]: ...
    async def start(self, name: str) -> None: ...


class Ends(Protocol):
    """Where processes that begin and end are told of."""

    async def next(self) -> ProcessBegan | ProcessEnded: ...


@dataclass(frozen=True)
class RegisteredProcess:
    """A process by what it says of itself, which is not what circus knows if it was forked (process/forkserver)."""

    pid: int
    lease: str


class ProcessRegistry(Protocol):
    """What is recorded of watchers, and kept up to date."""

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        """The process that has registered itself last. Raises StateError or NotRunningError."""

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        """Told the watcher whose process ended: the pid that circus knew, if that is known, and what that process had
        registered."""

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher is to run, and to be started again when it ends. Raises StateError or
        NotRunningError."""


@dataclass
class _Watched:
    """What the keeper knows of one watcher. `log_start`: where the log of its present process begins."""

    record: LifeRecord = field(default_factory=LifeRecord)
    restart_at: float | None = None
    missed_exit: bool = False
    log_start: int = 0


class Restarter:
    """`quiet` names watchers that never say that they are ready: running is all that is asked of them. `expendable`
    ones that cannot be started are left alone: nothing depends on them."""

    def __init__(
        self,
        circus: Starter,
        register: ProcessRegistry,
        log_of: Callable[[str], Path],
        report: Report,
        *,
        quiet: Collection[str] = (),
        expendable: Collection[str] = (),
        limits: RestartLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._circus = circus
        self._register = register
        self._log_of = log_of
        self._report = report
        self._quiet = frozenset(quiet)
        self._expendable = frozenset(expendable)
        self._limits = limits or RestartLimits()
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._present: frozenset[str] = frozenset()
        self._ended: dict[str, ProcessEnded] = {}
        self._news = asyncio.Event()
        self._told_at = -math.inf
        self._said = ""

    def note_ready(self, watcher: str) -> None:
        """The process of the watcher said that it is ready."""
        watched = self._of(watcher)
        watched.record = became_ready(watched.record, self._clock())

    async def listen(self, events: Ends) -> None:
        """Learn which processes begin and end, and their exit codes, until cancelled."""
        while True:
            match await events.next():
                case ProcessEnded(watcher=watcher) as ended:
                    self._ended[watcher] = ended
                case ProcessBegan(watcher=watcher):
                    self._ended.pop(watcher, None)
            self._told_at = self._clock()
            self._news.set()

    async def run(self) -> None:
        """Keep everything running, until cancelled. Raises SupervisorError when a service is given up."""
        while True:
            self._news.clear()
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S if self._busy() else _LOOK_SELDOM_S):
                    await self._news.wait()

    def _busy(self) -> bool:
        """Whether something is about to change."""
        if self._clock() - self._told_at < _RECENTLY_S:
            return True
        return any(each.missed_exit or each.restart_at not in (None, math.inf) for each in self._watched.values())

    async def look(self) -> None:
        """One round of `run`."""
        statuses = await self._circus.statuses()
        self._forget(self._present - statuses.keys())
        self._present = frozenset(statuses)
        for name, status in statuses.items():
            if status == STOPPED:
                try:
                    await self._tend(name)
                except (NotRunningError, StateError) as error:
                    # Looked at again in the next round.
                    self._say_once(f"{name}  ended, and is started again when the statefile can be used: {error}")
            elif status == ACTIVE:
                self._note_running(name)

    def _note_running(self, name: str) -> None:
        watched = self._of(name)
        # Whoever restarts a process may have started the next one already.
        watched.restart_at, watched.missed_exit = None, False
        if name in self._quiet:
            self.note_ready(name)

    async def _tend(self, name: str) -> None:
        watched = self._of(name)
        if watched.restart_at is None:
            if self._exit_is_known(name, watched):
                await self._mourn(name, watched)
        elif self._clock() >= watched.restart_at:
            wanted = await self._register.wanted(name)
            watched.restart_at = None
            if wanted:
                watched.log_start = size(self._log_of(name))
                await self._circus.start(name)

    def _exit_is_known(self, name: str, watched: _Watched) -> bool:
        """Whether there is nothing to wait for: the exit code travels on another socket than the status, and
        circus loses it when the process ends at an unlucky moment."""
        if name.lower() in self._ended or watched.missed_exit:
            return True
        watched.missed_exit = True
        return False

    async def _mourn(self, name: str, watched: _Watched) -> None:
        registered = await self._register.registered(name)
        if (await self._circus.statuses()).get(name) != STOPPED:
            # Another process runs by now. It may be the one that has registered.
            return
        ended = self._ended.get(name.lower())
        exit_code, pid = (ended.exit_code, ended.pid) if ended is not None else (None, None)
        await self._register.ended(name, pid, registered)
        wanted = await self._register.wanted(name)
        self._ended.pop(name.lower(), None)
        watched.missed_exit = False
        if not wanted:
            return
        decision, watched.record = died(watched.record, exit_code, self._limits, self._clock())
        match decision:
            case Restart(at=at, delay_s=delay_s):
                watched.restart_at = at
                self._show(name, f"{describe_exit(exit_code)}, restart in {delay_s:g} s", self._last_lines(name))
            case GiveUp(reason=reason) if name in self._expendable:
                watched.restart_at = math.inf
                self._show(name, f"{reason} ({describe_exit(exit_code)}), going on without it", self._last_lines(name))
            case GiveUp(reason=reason):
                raise self._given_up(name, f"{reason} ({describe_exit(exit_code)})")

    def _given_up(self, name: str, reason: str) -> SupervisorError:
        lines = self._last_lines(name)
        self._show(name, reason, lines)
        said = last_error(lines)
        cause = f"{name} {reason}" if said is None else f"{name} {reason}: {said}"
        return SupervisorError(cause, f"its log is {self._log_of(name)}")

    def _show(self, name: str, what: str, lines: Iterable[str]) -> None:
        self._report.step(f"{name}  ended: {what}")
        quote(self._report, lines)

    def _last_lines(self, name: str) -> list[str]:
        return tail(self._log_of(name), _LINES_SHOWN, after=self._of(name).log_start)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._report.step(text)
        self._said = text

    def _forget(self, names: Iterable[str]) -> None:
        """Watchers that were removed. One that takes such a name later has a life of its own."""
        for name in names:
            self._watched.pop(name, None)
            self._ended.pop(name.lower(), None)

    def _of(self, name: str) -> _Watched:
        return self._watched.setdefault(name, _Watched())
