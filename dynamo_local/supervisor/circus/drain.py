"""Ordered shutdown: one service after those that depend on it is told to end, given time, and ended.

A process is told by SIGTERM and left to itself: a stop by circus would block all other commands meanwhile.
The watcher is removed once its process and whatever that left behind in its process group are gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.names import parse_watcher
from dynamo_local.process.groups import kill_group, members
from dynamo_local.supervisor.server.report import Report
from state.processes import start_time

_LOOK_EVERY_S = 0.05
_KILL_DEADLINE_S = 10.0
"""How long a killed process may take to be gone: one that frees much memory, or hangs in a driver."""


class Watched(Protocol):
    """Watchers that are to stop: circus' (circus.CircusClient), or what is left without circus (orphans.Orphans)."""

    async def statuses(self) -> Mapping[str, str]:
        """All that there are, by name."""

    async def pids(self, name: str) -> tuple[int, ...]:
        """Processes of a watcher that run now."""

    async def remove(self, name: str) -> None:
        """Forget a watcher whose processes have ended."""


@dataclass(frozen=True)
class Drain:
    """How to stop. `hurry`, once set, cuts every wait short. `registered` tells the pid by which a watcher's process
    has registered, which is not the one that circus knows if it was forked (process/forkserver); None if it has not."""

    circus: Watched
    report: Report
    hurry: asyncio.Event
    deadline_s: float
    registered: Callable[[str], int | None] = lambda _: None

    async def stop_all(self, order: Sequence[Collection[str]]) -> None:
        """Stop all watchers, in the order of their services. Services that stand together stop at the same time."""
        # Looked at again after each wave: a change that was under way may have added one more.
        while left := waves(await self.circus.statuses(), order):
            await asyncio.gather(*(self.stop(name) for name in left[0]))

    async def stop(self, name: str) -> None:
        """Stop one watcher: end its processes, remove it."""
        if not await self.end(name):
            self.report.step(f"{name}  cannot be killed: it may hang in a driver")
        await self.circus.remove(name)

    async def end(self, name: str) -> bool:
        """End a watcher's processes. Returns whether they are gone."""
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
                await asyncio.wait_for(self.hurry.wait(), _LOOK_EVERY_S)
        return True


def waves(watchers: Iterable[str], order: Sequence[Collection[str]]) -> list[list[str]]:
    """Watchers in stop order, those in a group that stop at the same time. Services that `order` does not name go
    first."""
    rank = {service: place for place, services in enumerate(order) for service in services}
    groups: dict[int, list[str]] = {}
    for name in sorted(watchers):
        groups.setdefault(rank.get(parse_watcher(name).service, -1), []).append(name)
    return [groups[place] for place in sorted(groups)]


async def _gone(groups: Collection[int], deadline_s: float) -> bool:
    give_up_at = time.monotonic() + deadline_s
    while any(members(group) for group in groups):
        if time.monotonic() >= give_up_at:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True
