"""Orphans: processes of a server whose parent has died. `dynamo serve`, the nearest subreaper, becomes their parent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.process.forkserver.protocol import SPARE_MODULE
from dynamo_local.supervisor.circus.adopted import command_line, parse_adoption
from dynamo_local.supervisor.circus.client import ACTIVE
from state.machine.processes import Kin, Process, ProcFs, kin
from state.paths import StatePaths
from state.statefile.leftovers import leftovers

_KILL_S = 10.0
_KEEP_S = 1.0
"""The time for which others can read the exit code of an ended process (circus/adopted.py), before it is reaped."""


@dataclass(frozen=True)
class Orphan:
    """An orphan and its family. `stands_in`: it stands for another process (circus/adopted.py)."""

    process: Process
    kin: Kin
    stands_in: bool

    @property
    def watcher(self) -> str:
        return self.process.environ[WATCHER_ENV]


def processes_of_watchers(orphans: Iterable[Orphan]) -> dict[str, Process]:
    """The process of each watcher that circusd had started. Pure.

    Such a process leads a group, but no session: only engines lead sessions. So does the fork of a fork server that has
    died, but its launcher is older, and is the one that circusd had started.
    """
    found: dict[str, Process] = {}
    for orphan in sorted(orphans, key=lambda orphan: orphan.process.start_time):
        pid, family = orphan.process.pid, orphan.kin
        if family.group == pid and family.session != pid and not orphan.stands_in:
            found.setdefault(orphan.watcher, orphan.process)
    return found


@dataclass
class Orphans:
    """The watchers (drain.Watched) that a dead circusd has left to this process. Only those that have a process."""

    paths: StatePaths
    _found: dict[str, Process] = field(default_factory=dict, init=False)
    _removed: set[str] = field(default_factory=set, init=False)

    async def look(self) -> Mapping[str, Process]:
        """The process of each watcher. Processes that stand for others are killed: they would die with circusd anyway,
        or, if the other one is dead, start its command again."""
        return await asyncio.to_thread(self._look)

    async def statuses(self) -> Mapping[str, str]:
        return {name: ACTIVE for name in await self.look() if name not in self._removed}

    async def pids(self, name: str) -> tuple[int, ...]:
        process = self._found.get(name)
        return () if process is None else (process.pid,)

    async def remove(self, name: str) -> None:
        self._removed.add(name)

    def _look(self) -> Mapping[str, Process]:
        orphans = [orphan for process in leftovers(self.paths, ProcFs().snapshot()) if (orphan := _orphan(process))]
        ProcFs().end([orphan.process for orphan in orphans if orphan.stands_in], 0.0, _KILL_S)
        self._found = processes_of_watchers(orphans)
        return dict(self._found)


def _orphan(process: Process) -> Orphan | None:
    with suppress(OSError):
        family, command = kin(process.pid), command_line(process.pid)
        # A spare is no process that circusd had started, though it may be older than the fork server.
        if family is not None and family.parent == os.getpid() and SPARE_MODULE not in command:
            return Orphan(process, family, parse_adoption(command) is not None)
    return None


@dataclass
class Reaper:
    """Reaps orphans that have ended. Call `look` whenever a child has ended.

    `spared`: pid of the child that this process has started itself, circusd, whose end is awaited elsewhere.
    """

    spared: Callable[[], int]
    keep_s: float = _KEEP_S
    _seen: dict[int, float] = field(default_factory=dict, init=False)
    _awaited: bool = field(default=False, init=False)

    def look(self) -> None:
        """Reap children that ended `keep_s` ago or earlier, and look again when it is time for the others."""
        now = time.monotonic()
        self._seen = {pid: self._seen.get(pid, now) for pid in _dead_children() if pid != self.spared()}
        for pid in [pid for pid, since in self._seen.items() if now - since >= self.keep_s]:
            del self._seen[pid]
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if self._seen and not self._awaited:
            self._awaited = True
            asyncio.get_running_loop().call_later(self.keep_s, self._look_again)

    def _look_again(self) -> None:
        self._awaited = False
        self.look()


def _dead_children() -> list[int]:
    """Pids of children of this process that have ended and were not reaped yet."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end while it is read.
        with suppress(OSError):
            found += [int(word) for word in (thread / "children").read_text().split()]
    return [pid for pid in found if _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves the child to be reaped later.
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False
