"""This machine as the one place of a graph: reservations in the statefile, processes under circusd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from dynamo_local.core.errors import DeviceError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.circus.client import STOPPED
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.machine import Devices, Watchers
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Reservation, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.reports.logs import Follower, last_error, size, tail
from state.devices.allocation import Inventory, allocate, held_by
from state.statefile.model import Component, State
from state.statefile.transitions import release, reserve, shares_taken

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
        reserved = {name: _reservation(entry) for name, entry in state.here.items() if entry.phase == "reserved"}
        return {state.node: Place(state.node, self.inventory, reserved)}

    async def reserve(self, watcher: Watcher, need: Need) -> Reservation:
        # Virtual workers compute nothing, and share devices with whoever does.
        elsewhere = {} if need.virtual else await self.devices.elsewhere()
        chosen = self.inventory if need.on is None else _only(self.inventory, need.on)

        def reserved(state: State) -> State:
            if need.node not in ("", state.node):
                raise DeviceError(f"{watcher.service} is to live on node {need.node}, and this is {state.node}")
            devices = allocate(chosen, shares_taken(state), need.devices, watcher.service, elsewhere, need.share)
            return reserve(state, watcher, role=need.role, devices=devices, share=need.share)

        made = _reservation((await self.books.update(reserved)).components[str(watcher)])
        try:
            await self._hold(made)
        except (DeviceError, NotRunningError, StateError):
            # What cannot be released now, because circusd does not answer, the reconciler releases.
            with suppress(SupervisorError):
                await self.release(str(watcher))
            raise
        return made

    async def start(self, plan: WatcherPlan) -> None:
        entry = (await self.books.read()).here.get(plan.name)
        if entry is None or not entry.holds or entry.devices != plan.devices:
            raise SupervisorError(f"{plan.name} has not reserved {list(plan.devices)}", "reserve them first")
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

    async def _check_here(self, watcher: str) -> None:
        """Raise SupervisorError for a process of another node. That none of its name runs here says nothing of it."""
        state = await self.books.read()
        entry = state.components.get(watcher)
        if entry is not None and entry.node != state.node:
            raise SupervisorError(f"{watcher} runs on node {entry.node}, and this is {state.node}")

    async def _hold(self, reservation: Reservation) -> None:
        """Have the server hold the devices. Raises DeviceError if another server took one of them first."""
        refused = await self.devices.hold_claimed()
        missing = {device_id: who for device_id, who in refused.items() if device_id in reservation.devices}
        if missing:
            raise DeviceError(f"a device was taken by somebody else{held_by(self.inventory.kind, missing)}")


def log_part(log: Path, lines: int, after: int | None) -> LogPart:
    """Read a log as `Places.log` does. Blocks."""
    follower = Follower(log, after or 0)
    found = follower.last_lines(lines) if after is None else follower.new_lines()[-lines:]
    return LogPart(tuple(found), follower.offset)


def _only(inventory: Inventory, ids: Collection[int]) -> Inventory:
    return replace(inventory, devices=tuple(device for device in inventory.devices if device.id in ids))


def _reservation(entry: Component) -> Reservation:
    return Reservation(entry.watcher, entry.node, entry.devices, entry.resources.share)


def _without_reservation(state: State, watcher: str) -> State:
    entry = state.here.get(watcher)
    return release(state, watcher) if entry is not None and entry.phase == "reserved" else state
