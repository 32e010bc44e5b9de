"""Ordered shutdown: service after service is told to end, given time, and ended.

A process is told by SIGTERM and left to itself: a stop by circus would block all other commands meanwhile.
The watcher is removed once its process and whatever that left behind in its process group are gone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.names import parse_watcher
from dynamo_local.supervisor.circus import CircusClient
from dynamo_local.supervisor.process_groups import kill_group, members
from dynamo_local.supervisor.report import Report
from state.processes import start_time

_LOOK_EVERY_S = 0.05
_KILL_DEADLINE_S = 10.0
"""How long a killed process may take to be gone: one that frees much memory, or hangs in a driver."""


@dataclass(frozen=True)
class Drain:
    """How to stop. `hurry`, once set, cuts every wait short."""

    circus: CircusClient
    report: Report
    hurry: asyncio.Event
    deadline_s: float

    async def stop_all(self, order: Sequence[str]) -> None:
        """Stop all watchers, service by service in `order`, each service's processes at the same time."""
        for names in waves(await self.circus.statuses(), order):
            await asyncio.gather(*(self.stop(name) for name in names))

    async def stop(self, name: str) -> None:
        """Stop one watcher: end its processes, remove it."""
        pids = await self.circus.pids(name)
        if pids and not self.hurry.is_set():
            await self.circus.signal(name, signal.SIGTERM)
            if not await self._ended(pids, self.deadline_s):
                self.report.step(f"{name}  does not end by itself, killing it")
        for pid in pids:
            kill_group(pid)
        if not await _gone(pids, _KILL_DEADLINE_S):
            self.report.step(f"{name}  cannot be killed: it may hang in a driver")
        await self.circus.remove(name)

    async def _ended(self, pids: Collection[int], deadline_s: float) -> bool:
        give_up_at = time.monotonic() + deadline_s
        while any(start_time(pid) is not None for pid in pids):
            if self.hurry.is_set() or time.monotonic() >= give_up_at:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self.hurry.wait(), _LOOK_EVERY_S)
        return True


def waves(watchers: Iterable[str], order: Sequence[str]) -> list[list[str]]:
    """Watchers grouped by service in stop order. Services that `order` does not name go first."""
    rank = {service: place for place, service in enumerate(order)}
    groups: dict[tuple[int, str], list[str]] = {}
    for name in sorted(watchers):
        service = parse_watcher(name).service
        groups.setdefault((rank.get(service, -1), service), []).append(name)
    return [groups[key] for key in sorted(groups)]


async def _gone(groups: Collection[int], deadline_s: float) -> bool:
    give_up_at = time.monotonic() + deadline_s
    while any(members(group) for group in groups):
        if time.monotonic() >= give_up_at:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True
