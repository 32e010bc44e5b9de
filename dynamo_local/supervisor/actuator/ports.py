"""The interfaces that the actuator works through: circus's watchers, the fleet on the bus, devices, the statefile.

The interfaces are narrow, so that a test can replace each, and stop the actuator between any two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_local.core.messages.admin import RoleAnswer
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import finish_in_thread
from state.statefile.model import State


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


class Fleet(Protocol):
    """The workers that are ready, by their presences on the bus."""

    def is_ready(self, lease: str) -> bool:
        """Whether the process of that lease is ready: a worker then takes requests, or prefill jobs."""

    async def revoke(self, lease: str, revision: str) -> None:
        """Have the routers send nothing to that worker of an endpoint's revision, or, if `revision` is empty, of the
        graph itself, from now on. Raises BusError."""

    async def changed(self, within_s: float) -> None:
        """Wait until a presence changes, or until the time is over."""


class Devices(Protocol):
    """The devices that the servers of this machine hold (supervisor/upkeep/devices.py)."""

    async def elsewhere(self) -> Mapping[int, str]:
        """Devices that others hold, each with its holder in words."""

    async def hold_claimed(self) -> Mapping[int, str]:
        """Have our server hold the devices that are claimed, and let go of the rest.

        Returns the devices that it could not take, each with its holder. Raises BusError or DecodeError when the server
        does not answer.
        """


class Statefile(Protocol):
    """The statefile (state.statefile.store.StateStore). Calls block for milliseconds."""

    def read(self) -> State: ...
    def update(self, change: Callable[[State], State]) -> State: ...


@dataclass(frozen=True)
class Ports:
    """The ports of one actuator.

    `namespace`: of the server whose processes are changed. `change_lock`: held for the time of a change, by one process
    at a time. `check_changeable`: raises SupervisorError once the server is ending. `change_role(watcher, role)`: asks
    a worker to take up a role. `log_file`: the log of a watcher. `clock`: seconds.
    """

    namespace: str
    store: Statefile
    devices: Devices
    watchers: Watchers
    fleet: Fleet
    change_lock: Callable[[], AbstractAsyncContextManager[None]]
    check_changeable: Callable[[], None]
    change_role: Callable[[str, str], Awaitable[RoleAnswer]]
    log_file: Callable[[str], Path]
    report: Report
    clock: Callable[[], float]

    async def read(self) -> State:
        """Read the statefile."""
        return await asyncio.to_thread(self.store.read)

    async def update(self, change: Callable[[State], State]) -> State:
        """Update the statefile. Whoever is cancelled meanwhile waits for the end of the update: it is not to happen
        after the lock on changes is free."""
        return await finish_in_thread(lambda: self.store.update(change))


@dataclass(frozen=True)
class Result:
    """The result of a change, of which `LocalActuator.apply` makes an ActionOutcome."""

    done: bool
    watcher: str | None
    note: str
    unexplained: bool = False
