"""Ending a worker for good, in steps each of which may be the last one before a crash: begun anew, it goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import WORKER_ROLES
from dynamo_local.core.planning.actions import RemoveWorker
from dynamo_local.supervisor.actuator.claims import retire_worker
from dynamo_local.supervisor.actuator.ports import Ports, Result
from state.model import Component, State
from state.transitions import clear_lease, release, retire


@dataclass(frozen=True)
class WorkerRemoval:
    """`drain_deadline_s`: for a worker to finish what it has and end by itself."""

    world: Ports
    drain_deadline_s: float

    async def remove(self, change: RemoveWorker) -> Result:
        """End a worker in order. Raises UsageError for what is not one."""
        await asyncio.to_thread(self.world.books.update, lambda state: retire_worker(state, change))
        await self.finish(change.watcher)
        return Result(True, change.watcher, "ended")

    async def undo(self, watcher: str, deadline_s: float) -> None:
        """End a worker that was added in vain."""
        await asyncio.to_thread(self.world.books.update, lambda state: retire(state, watcher))
        await self.finish(watcher, deadline_s)

    async def finish(self, watcher: str, deadline_s: float | None = None) -> None:
        """End a worker that is marked as retiring: it gets nothing new, finishes, ends, and lets go of its devices."""
        await self._end(watcher, self.drain_deadline_s if deadline_s is None else deadline_s)
        await asyncio.to_thread(self.world.books.update, lambda state: release(state, watcher))
        # It does so by itself, a moment later.
        with suppress(BusError, DecodeError):
            await self.world.devices.settle()

    async def clear(self, watcher: str) -> None:
        """End the process of an entry that is marked as restarting: name and devices are kept for the next one."""
        await self._end(watcher, self.drain_deadline_s)
        # One that was killed could not do so itself; it must not be taken for the next one. It may have registered only
        # after it was told to end.
        await asyncio.to_thread(self.world.books.update, lambda state: _voided(state, watcher))

    async def _end(self, watcher: str, deadline_s: float) -> None:
        component = (await asyncio.to_thread(self.world.books.read)).components[watcher]
        await self._revoke(component)
        await self.world.watchers.end(watcher, deadline_s)
        await self.world.watchers.remove(watcher)

    async def _revoke(self, component: Component) -> None:
        # A prefill worker takes its jobs itself, and stops doing so when it is told to end.
        if component.lease is None or component.role not in WORKER_ROLES:
            return
        self.world.report.step(f"{component.watcher_name}  gets no more requests")
        try:
            await self.world.fleet.revoke(component.lease)
        except BusError as error:
            # It says itself that it drains, as soon as it is told to end.
            self.world.report.step(f"{component.watcher_name}  lease not revoked: {error}")


def _voided(state: State, watcher: str) -> State:
    lease = state.components[watcher].lease
    return state if lease is None else clear_lease(state, watcher, lease)
