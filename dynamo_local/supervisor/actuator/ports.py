"""The interfaces that the actuator works through: the places where processes live, the fleet on the bus, the statefile.

The interfaces are narrow, so that a test can replace each, and stop the actuator between any two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import Inventory
from state.statefile.model import State


class Fleet(Protocol):
    """The workers that are ready, by their presences on the bus."""

    def is_ready(self, lease: str) -> bool:
        """Whether the process of that lease is ready: a worker then takes requests, or prefill jobs."""

    async def revoke(self, lease: str, revision: str) -> None:
        """Have the routers send nothing to that worker of an endpoint's revision, or, if `revision` is empty, of the
        graph itself, from now on. Raises BusError."""

    async def changed(self, within_s: float) -> None:
        """Wait until a presence changes, or until the time is over."""


@dataclass(frozen=True)
class Ports:
    """The ports of one actuator.

    `namespace`: of the server whose processes are changed. `lock`: held for the time of a change, by all actuators of
    the same processes. `change_role(watcher, role)`: has a worker take up a role, or raises UsageError. `clock`:
    seconds.
    """

    namespace: str
    books: Books
    places: Places
    fleet: Fleet
    lock: asyncio.Lock
    change_role: Callable[[str, str], Awaitable[None]]
    report: Report
    clock: Callable[[], float]

    async def read(self) -> State:
        """Read the statefile."""
        return await self.books.read()

    async def update(self, change: Callable[[State], State]) -> State:
        """Update the statefile, as `Books.update` does."""
        return await self.books.update(change)

    async def inventory(self, node: str) -> Inventory:
        """The devices of a node. Raises SupervisorError if it does not answer."""
        places = await self.places.places()
        if node not in places:
            raise SupervisorError(f"node {node} does not answer", "what runs there is unknown until it does")
        return places[node].inventory


@dataclass(frozen=True)
class Result:
    """The result of a change, of which `LocalActuator.apply` makes an ActionOutcome."""

    done: bool
    watcher: str | None
    note: str
    unexplained: bool = False
    node_failed: bool = False
