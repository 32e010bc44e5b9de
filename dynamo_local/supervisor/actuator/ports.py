"""What the actuator needs of the world: watchers, the fleet on the bus, the statefile. Narrow, so that a test can stand
in for each and stop it between any two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_local.core.messages.admin import RoleAnswer
from dynamo_local.supervisor.server.plan import WatcherPlan
from dynamo_local.supervisor.server.report import Report
from state.model import State


class Watchers(Protocol):
    """circusd's watchers, by name. All methods raise SupervisorError when it does not answer or refuses."""

    async def statuses(self) -> Mapping[str, str]:
        """Status of every watcher, as circus.CircusClient tells it."""

    async def add(self, plan: WatcherPlan) -> None:
        """Register and start a watcher. Harmless if there is one already."""

    async def end(self, name: str, deadline_s: float) -> None:
        """Tell the watcher's process to end, and wait until it and what it has forked are gone; from the deadline on
        they are killed. Harmless when nothing runs. Raises SupervisorError if they live on."""

    async def remove(self, name: str) -> None:
        """Forget a watcher. Harmless when there is none."""


class Fleet(Protocol):
    """What workers say of themselves on the bus."""

    def is_ready(self, lease: str) -> bool:
        """Whether that process is ready: a worker then takes requests, or prefill jobs."""

    async def revoke(self, lease: str) -> None:
        """Have nobody route anything to that worker from now on. Raises BusError."""

    async def changed(self, within_s: float) -> None:
        """Wait until something about the fleet changes, or for so long."""


class Devices(Protocol):
    """What the machine's other servers hold, and what ours does (supervisor/upkeep/devices.py)."""

    async def elsewhere(self) -> Mapping[int, str]:
        """By device: who else holds it."""

    async def settle(self) -> Mapping[int, str]:
        """Have our server hold what is claimed, and let go of the rest. Returns what it could not get: who has it, by
        device. Raises BusError or DecodeError when it does not answer."""


class Statefile(Protocol):
    """The statefile. Calls block for milliseconds."""

    def read(self) -> State: ...
    def update(self, change: Callable[[State], State]) -> State: ...


@dataclass(frozen=True)
class Ports:
    """Everything around the actuator.

    `turn`: held for the time of a change, by one process at a time. `check`: raises SupervisorError once the server is
    ending. `switch`: has a worker take up a role. `clock`: seconds.
    """

    books: Statefile
    devices: Devices
    watchers: Watchers
    fleet: Fleet
    turn: Callable[[], AbstractAsyncContextManager[None]]
    check: Callable[[], None]
    switch: Callable[[str, str], Awaitable[RoleAnswer]]
    log_of: Callable[[str], Path]
    report: Report
    clock: Callable[[], float]


@dataclass(frozen=True)
class Result:
    """What became of a change: `Outcome` without what the caller knows."""

    done: bool
    watcher: str | None
    note: str
