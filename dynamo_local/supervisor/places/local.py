"""This machine as the one place of a graph: reservations in the statefile, processes under circusd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from dynamo_local.core.errors import DeviceError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.circus.client import STOPPED, CircusClient
from dynamo_local.supervisor.circus.drain import Drain
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Slot, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.reports.logs import Follower, last_error, size, tail
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import finish_in_thread
from state.devices.allocation import Inventory, allocate, held_by
from state.statefile.model import State
from state.statefile.transitions import release, reserve, shares_taken

# The statefile, read and updated beside the event loop.


class Statefile(Protocol):
    """The statefile (state.statefile.store.StateStore). Calls block for milliseconds."""

    def read(self) -> State: ...
    def update(self, change: Callable[[State], State]) -> State: ...


@dataclass(frozen=True)
class Books:
    """The statefile. Both methods raise NotRunningError once there is none, and StateError."""

    store: Statefile

    async def read(self) -> State:
        """Read the statefile."""
        return await asyncio.to_thread(self.store.read)

    async def update(self, change: Callable[[State], State]) -> State:
        """Update the statefile. Whoever is cancelled meanwhile waits for the end of the update: it is not to happen
        after the lock on changes is free."""
        return await finish_in_thread(lambda: self.store.update(change))


# What this machine gives to its place: the watchers of circusd, and the devices that the servers hold.


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


_LINES_READ = 15


@dataclass(frozen=True)
class LocalPlaces:
    """This machine (port.Places). `log_file`: the log of a watcher."""

    books: Books
    inventory: Inventory
    devices: Devices
    watchers: Watchers
    log_file: Callable[[str], Path]
    _log_starts: dict[str, int] = field(default_factory=dict, init=False)
    """Where the log of a watcher's process begins, in bytes, for those that were started from here."""

    async def places(self) -> Mapping[str, Place]:
        state = await self.books.read()
        reserved = frozenset(name for name, entry in state.here.items() if entry.phase == "reserved")
        return {state.node: Place(state.node, self.inventory, reserved)}

    async def reserve(self, watcher: Watcher, need: Need) -> Slot:
        # Virtual workers compute nothing, and share devices with whoever does.
        elsewhere = {} if need.virtual else await self.devices.elsewhere()
        chosen = self.inventory if not need.on else _only(self.inventory, need.on)

        def reserved(state: State) -> State:
            if need.node not in ("", state.node):
                raise DeviceError(f"{watcher.service} is to live on node {need.node}, and this is {state.node}")
            devices = allocate(chosen, shares_taken(state), need.devices, watcher.service, elsewhere, need.share)
            return reserve(*(state, watcher), role=need.role, devices=devices, share=need.share, revision=need.revision)

        entry = (await self.books.update(reserved)).components[str(watcher)]
        made = Slot(entry.node, entry.devices)
        try:
            await self._hold(made)
        except (DeviceError, NotRunningError, StateError):
            # What cannot be released now, because circusd does not answer, the reconciler releases.
            with suppress(SupervisorError):
                await self.release(str(watcher))
            raise
        return made

    async def start(self, plan: WatcherPlan) -> None:
        await self._check_reserved(plan)
        self._log_starts[plan.name] = size(self.log_file(plan.name))
        await self.watchers.add(plan)

    async def end(self, watcher: str, deadline_s: float) -> None:
        await self._check_here(watcher)
        await self.watchers.end(watcher, deadline_s)
        await self.watchers.remove(watcher)

    async def release(self, watcher: str) -> None:
        await self._check_here(watcher)
        if watcher in await self.watchers.statuses():
            raise SupervisorError(f"{watcher} still runs", "end it first")
        await self.books.update(lambda state: _without_reservation(state, watcher))
        # Else the server lets go of the devices at its own next look, a moment later.
        with suppress(NotRunningError, StateError):
            await self.devices.hold_claimed()

    async def statuses(self) -> Mapping[str, Status]:
        state = await self.books.read()
        found = await self.watchers.statuses()
        others = [name for name, entry in state.components.items() if entry.holds and entry.node != state.node]
        statuses: dict[str, Status] = dict.fromkeys(others, "unknown")
        return statuses | {name: "stopped" if status == STOPPED else "active" for name, status in found.items()}

    async def last_error(self, watcher: str) -> str | None:
        return last_error(tail(self.log_file(watcher), _LINES_READ, after=self._log_starts.get(watcher, 0)))

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        return await asyncio.to_thread(log_part, self.log_file(watcher), lines, after)

    async def _check_reserved(self, plan: WatcherPlan) -> None:
        """Raise SupervisorError for a process whose devices are not reserved for it here."""
        entry = (await self.books.read()).here.get(plan.name)
        if entry is None or not entry.holds or entry.devices != plan.devices:
            raise SupervisorError(f"{plan.name} has not reserved {list(plan.devices)}", "reserve them first")

    async def _check_here(self, watcher: str) -> None:
        """Raise SupervisorError for a process of another node. That none of its name runs here says nothing of it."""
        state = await self.books.read()
        entry = state.components.get(watcher)
        if entry is not None and entry.node != state.node:
            raise SupervisorError(f"{watcher} runs on node {entry.node}, and this is {state.node}")

    async def _hold(self, slot: Slot) -> None:
        """Have the server hold the devices. Raises DeviceError if another server took one of them first."""
        refused = await self.devices.hold_claimed()
        missing = {device_id: who for device_id, who in refused.items() if device_id in slot.devices}
        if missing:
            raise DeviceError(f"a device was taken by somebody else{held_by(self.inventory.kind, missing)}")


def log_part(log: Path, lines: int, after: int | None) -> LogPart:
    """Read a log as `Places.log` does. Blocks."""
    follower = Follower(log, after or 0)
    found = follower.last_lines(lines) if after is None else follower.new_lines()[-lines:]
    return LogPart(tuple(found), follower.offset)


def _only(inventory: Inventory, ids: Collection[int]) -> Inventory:
    return replace(inventory, devices=tuple(device for device in inventory.devices if device.id in ids))


def _without_reservation(state: State, watcher: str) -> State:
    entry = state.here.get(watcher)
    return release(state, watcher) if entry is not None and entry.phase == "reserved" else state
