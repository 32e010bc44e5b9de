"""Restarting a process: by another one in its place where a device is free, and under its own name where none is.

    another one    starting, and it says whom it replaces    kept, or undone: the old one has lost nothing
                   (ready) the old one is retiring            ended, removed, released
    the same name  restarting                                 ended, removed, started on the same devices, and awaited

Begun anew after a crash, each goes on; a process that was being started again is then started once more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dynamo_local.core.errors import DeviceError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import WORKER_ROLES
from dynamo_local.core.planning.actions import DeviceLimits, Restart
from dynamo_local.supervisor.actuator.add import WorkerAddition
from dynamo_local.supervisor.actuator.claims import claim_replacement, mark_restart, plan_in_place
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.server.blueprint import Blueprint
from dynamo_local.supervisor.server.logs import size
from dynamo_local.supervisor.server.plan import WatcherPlan
from state.model import State

_HEARD_WITHIN_S = 1.5
"""For every worker that is there to be heard of: three beats."""

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class WorkerRestart:
    """The actuator's restarts."""

    world: Ports
    blueprint: Blueprint
    up: WorkerAddition
    down: WorkerRemoval

    async def restart(self, change: Restart, limits: DeviceLimits) -> Result:
        """Have a new process in the place of that one. Raises UsageError for what cannot be restarted."""
        plan = await self._claimed_beside(change, limits)
        if plan is not None:
            return await self.up.start(plan)
        if not change.even_the_last:
            await self._check_answered(change.watcher)
        await asyncio.to_thread(
            self.world.books.update, lambda state: mark_restart(state, self.blueprint, change.watcher)
        )
        return await self.finish(change.watcher)

    async def finish(self, watcher: str) -> Result:
        """End the process of an entry that is marked as restarting, and see the next one to its readiness."""
        await self.down.clear(watcher)
        state = await asyncio.to_thread(self.world.books.read)
        plan = plan_in_place(state, self.blueprint, watcher)
        log_start = size(self.world.log_of(watcher))
        self.world.report.step(f"{watcher}  starting again")
        try:
            await self.world.watchers.add(plan)
        except SupervisorError as error:
            return await self.up.undone(watcher, str(error))
        return await self.up.await_ready(watcher, log_start)

    async def _claimed_beside(self, change: Restart, limits: DeviceLimits) -> WatcherPlan | None:
        """Name and devices of the one that is to take its place; None if there are no devices for it."""
        planned: list[WatcherPlan | None] = []
        elsewhere = await self.world.devices.elsewhere()

        def claimed(state: State) -> State:
            try:
                state, plan = claim_replacement(state, self.blueprint, change, limits, elsewhere)
            except DeviceError:
                plan = None
            planned.append(plan)
            return state

        await asyncio.to_thread(self.world.books.update, claimed)
        return planned[-1]

    async def _check_answered(self, watcher: str) -> None:
        """Raise UsageError if no other worker would answer requests while that one is away."""
        give_up_at = self.world.clock() + _HEARD_WITHIN_S
        while not await self._is_answered_without(watcher):
            if self.world.clock() >= give_up_at:
                raise UsageError(
                    f"no device is free for a worker in place of {watcher}, and no other one would answer meanwhile",
                    "free a device, or use --force if that is what you want",
                )
            await self.world.fleet.changed(_LOOK_EVERY_S)

    async def _is_answered_without(self, watcher: str) -> bool:
        state = await asyncio.to_thread(self.world.books.read)
        if state.components[watcher].role not in WORKER_ROLES:
            return True
        others = (c for c in state.components.values() if c.watcher_name != watcher and c.role in WORKER_ROLES)
        return any(c.phase is None and c.lease is not None and self.world.fleet.is_ready(c.lease) for c in others)
