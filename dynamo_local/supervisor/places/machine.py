"""What this machine gives to its place: the watchers of circusd, and the devices that the servers hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.drain import Drain
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.reports.report import Report


class Watchers(Protocol):
    """circusd's watchers, by name. All methods raise SupervisorError when circusd does not answer or refuses."""

    async def statuses(self) -> Mapping[str, str]:
        """Status of every watcher, as `CircusClient.statuses` gives it."""

    async def add(self, plan: WatcherPlan) -> None:
        """Register and start a watcher. Harmless if there is one already."""

    async def end(self, name: str, deadline_s: float) -> None:
        """Tell the watcher's process to end, and wait until it and its children are gone; kill them at the deadline.

        Harmless when nothing runs. Raises SupervisorError if a process survives even that.
        """

    async def remove(self, name: str) -> None:
        """Forget a watcher. Harmless when there is none."""


class Devices(Protocol):
    """The devices that the servers of this machine hold (supervisor/upkeep/devices.py)."""

    async def elsewhere(self) -> Mapping[int, str]:
        """Devices that others hold, each with its holder in words."""

    async def hold_claimed(self) -> Mapping[int, str]:
        """Have our server hold the devices that are claimed, and let go of the rest.

        Returns the devices that it could not take, each with its holder. Raises NotRunningError or StateError when the
        statefile cannot be read.
        """


@dataclass(frozen=True)
class CircusWatchers:
    """The watchers of a running circusd. `registered`: see Drain."""

    circus: CircusClient
    specs: WatcherSpecs
    registered: Callable[[str], int | None]
    report: Report

    async def statuses(self) -> Mapping[str, str]:
        return await self.circus.statuses()

    async def add(self, plan: WatcherPlan) -> None:
        await self.circus.add(self.specs.of(plan))

    async def end(self, name: str, deadline_s: float) -> None:
        drain = Drain(self.circus, self.report, asyncio.Event(), deadline_s, self.registered)
        if not await drain.end(name):
            raise SupervisorError(f"{name} cannot be killed", "it may hang in a driver; it keeps its devices")

    async def remove(self, name: str) -> None:
        await self.circus.remove(name)
