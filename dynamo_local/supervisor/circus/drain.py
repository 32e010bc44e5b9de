"""Ordered shutdown: each service ends after those that depend on it. A process is told to end, given time, then killed.

Processes get SIGTERM from here and not from circus, whose own stop would block all other commands while it waits. A
watcher is removed once its process, and all others in its process group, are gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.names import parse_watcher
from dynamo_local.process.groups import kill_group, members
from dynamo_local.supervisor.server.launch.templates import ENDPOINT_WORKERS
from dynamo_local.supervisor.server.reports.report import Report
from state.machine.processes import start_time

_LOOK_EVERY_S = 0.05
_KILL_DEADLINE_S = 10.0
"""The time that a killed process may take to be gone. Freeing much memory takes seconds."""


class Watched(Protocol):
    """Watchers that are to stop: circusd's (client.CircusClient), or those that a dead circusd left (Orphans)."""

    async def statuses(self) -> Mapping[str, str]:
        """Status of every watcher, by name."""

    async def pids(self, name: str) -> tuple[int, ...]:
        """Pids of a watcher's processes that run now."""

    async def remove(self, name: str) -> None:
        """Forget a watcher whose processes have ended."""


@dataclass(frozen=True)
class Drain:
    """Stops watchers.

    `hurry`, once set, cuts every wait short. `deadline_s`: for each process to end by itself. `registered`: the pid
    of a watcher's process in the statefile, or None. For a forked process (process/forkserver) it
    differs from the pid that circus knows. `after_first`: called by `stop_all` when those that stop first are gone, for
    what is to end elsewhere before the others.
    """

    circus: Watched
    report: Report
    hurry: asyncio.Event
    deadline_s: float
    registered: Callable[[str], int | None] = lambda _: None
    after_first: Callable[[], Awaitable[None]] | None = None

    async def stop_all(self, order: Sequence[Collection[str]]) -> None:
        """Stop all watchers, in the order of their services. Services of one group stop at the same time."""
        is_first = True
        # Listed again after each wave: a change that was under way may have added a watcher.
        while left := waves(await self.circus.statuses(), order):
            await asyncio.gather(*(self.stop(name) for name in left[0]))
            if is_first and self.after_first is not None:
                await self.after_first()
            is_first = False

    async def stop(self, name: str) -> None:
        """End a watcher's processes, and remove it."""
        if not await self.end(name):
            self.report.step(f"{name}  cannot be killed: it may hang in a driver")
        await self.circus.remove(name)

    async def end(self, name: str) -> bool:
        """End a watcher's processes, by SIGKILL at the deadline. Returns whether they are gone."""
        pids = await self.circus.pids(name)
        registered = await asyncio.to_thread(self.registered, name) if pids else None
        if pids and not self.hurry.is_set():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            if not await self._ended(pids, self.deadline_s):
                self.report.step(f"{name}  does not end by itself, killing it")
        groups = {*pids, registered or pids[0]} if pids else set()
        for group in groups:
            kill_group(group)
        return await _gone(groups, _KILL_DEADLINE_S)

    async def _ended(self, pids: Collection[int], deadline_s: float) -> bool:
        give_up_at = time.monotonic() + deadline_s
        while any(start_time(pid) is not None for pid in pids):
            if self.hurry.is_set() or time.monotonic() >= give_up_at:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self.hurry.wait()
        return True


def waves(watchers: Iterable[str], order: Sequence[Collection[str]]) -> list[list[str]]:
    """Group watchers that stop at the same time, in stop order. Services that `order` does not name stop first;
    ENDPOINT_WORKERS in it stands for the workers of all endpoints."""
    rank = {service: place for place, services in enumerate(order) for service in services}
    groups: dict[int, list[str]] = {}
    for name in sorted(watchers):
        watcher = parse_watcher(name)
        groups.setdefault(rank.get(ENDPOINT_WORKERS if watcher.revision else watcher.service, -1), []).append(name)
    return [groups[place] for place in sorted(groups)]


async def _gone(groups: Collection[int], deadline_s: float) -> bool:
    give_up_at = time.monotonic() + deadline_s
    while any(members(group) for group in groups):
        if time.monotonic() >= give_up_at:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True
