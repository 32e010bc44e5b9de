"""Adding a worker: claim, start, wait until it is routable; else everything is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_local.core.errors import BusError, DecodeError, DeviceError, SupervisorError
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.supervisor.actuator.claims import claim_worker
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.circus.client import STOPPED
from dynamo_local.supervisor.server.blueprint import Blueprint
from dynamo_local.supervisor.server.logs import last_error, size, tail
from dynamo_local.supervisor.server.plan import WatcherPlan
from state.devices import held_by, noun
from state.model import State
from state.transitions import in_phase, settle

UNDO_S = 5.0
"""For a worker that did not become ready to end by itself: it has nothing to finish."""

_LOOK_EVERY_S = 0.2
_LINES_READ = 15


@dataclass(frozen=True)
class WorkerAddition:
    """`ready_deadline_s`: for a worker to become routable."""

    world: Ports
    blueprint: Blueprint
    down: WorkerRemoval
    ready_deadline_s: float

    async def add(self, change: AddWorker, limits: DeviceLimits) -> Result:
        """Add a worker, or leave everything as it was. Raises UsageError for what cannot be added."""
        return await self.start(await self._claim(change, limits))

    async def start(self, plan: WatcherPlan) -> Result:
        """Start a worker that is claimed, and see it to the end."""
        log_start = size(self.world.log_of(plan.name))
        self.world.report.step(f"{plan.name}  starting{self._on_devices(plan)}")
        try:
            await self._hold(plan)
            await self.world.watchers.add(plan)
        except (SupervisorError, DeviceError, BusError, DecodeError) as error:
            return await self.undone(plan.name, str(error))
        return await self.await_ready(plan.name, log_start)

    async def await_ready(self, watcher: str, log_start: int = 0) -> Result:
        """See a process that was started to the end: settled, with the one that it replaces gone, or undone."""
        trouble = await self._trouble(watcher)
        if trouble is None:
            return await self._settled(watcher)
        said = last_error(tail(self.world.log_of(watcher), _LINES_READ, after=log_start))
        return await self.undone(watcher, trouble if said is None else f"{trouble}: {said}")

    async def undone(self, watcher: str, why: str) -> Result:
        """Take back a process that was started in vain."""
        self.world.report.step(f"{watcher}  {why}; taking it back")
        await self.down.undo(watcher, UNDO_S)
        return Result(False, watcher, f"{watcher} did not start: {why}")

    async def _settled(self, watcher: str) -> Result:
        replaced = (await asyncio.to_thread(self.world.books.read)).components[watcher].replaces
        state = await asyncio.to_thread(self.world.books.update, lambda state: settle(state, watcher))
        if replaced is None or replaced not in in_phase(state, "retiring"):
            return Result(True, watcher, "ready")
        self.world.report.step(f"{watcher}  ready")
        await self.down.finish(replaced)
        return Result(True, watcher, f"in place of {replaced}")

    async def _claim(self, change: AddWorker, limits: DeviceLimits) -> WatcherPlan:
        planned: list[WatcherPlan] = []
        elsewhere = await self.world.devices.elsewhere()

        def claimed(state: State) -> State:
            after, plan = claim_worker(state, self.blueprint, change, limits, elsewhere)
            planned.append(plan)
            return after

        await asyncio.to_thread(self.world.books.update, claimed)
        return planned[-1]

    async def _hold(self, plan: WatcherPlan) -> None:
        """Have the server hold the worker's devices. Raises DeviceError if another one was faster."""
        refused = await self.world.devices.settle()
        mine = {device_id: who for device_id, who in refused.items() if device_id in plan.devices}
        if mine:
            raise DeviceError(f"a device was taken by somebody else{held_by(self.blueprint.inventory.kind, mine)}")

    async def _trouble(self, watcher: str) -> str | None:
        """Wait until the worker is ready (None), or until it is clear that it will not be (why)."""
        give_up_at = self.world.clock() + self.ready_deadline_s
        while True:
            self.world.check()
            # First the statefile, then circus: who has died in between is seen as dead.
            state = await asyncio.to_thread(self.world.books.read)
            ended = _ended(watcher, await self.world.watchers.statuses())
            lease = state.components[watcher].lease
            if ended is None and lease is not None and self.world.fleet.is_ready(lease):
                return None
            if ended is not None:
                return ended
            if self.world.clock() >= give_up_at:
                return f"not ready within {self.ready_deadline_s:g} s"
            await self.world.fleet.changed(_LOOK_EVERY_S)

    def _on_devices(self, plan: WatcherPlan) -> str:
        if not plan.devices:
            return ""
        return f" on {noun(self.blueprint.inventory.kind, len(plan.devices))} {', '.join(map(str, plan.devices))}"


def _ended(watcher: str, statuses: Mapping[str, str]) -> str | None:
    """Why nothing can be expected of the worker any more, or None."""
    if watcher not in statuses:
        return "it was never started"
    return "it ended" if statuses[watcher] == STOPPED else None
