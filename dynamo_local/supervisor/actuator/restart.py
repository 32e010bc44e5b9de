"""Restarting a process: by another one in its place where a device is free, and under its own name where none is.

    another one    starting, with the name that it replaces    kept, or undone: the old one has lost nothing
                   (ready) the old one is retiring             ended, removed, released
    the same name  restarting                                  ended, removed, started on the same devices, awaited

Repeated after a crash, each goes on; a process that was being started again is then started once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.errors import DeviceError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import last_answering
from dynamo_local.core.planning.actions import DeviceLimits, Restart
from dynamo_local.supervisor.actuator.add import WorkerAddition
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, is_worker
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from state.statefile.model import Component, State
from state.statefile.transitions import claim, entry, restart

_HEARD_WITHIN_S = 1.5
"""Three heartbeats: every worker that runs has been heard on the bus by then."""

_POLL_S = 0.2


def template_of_replacement(state: State, blueprint: Blueprint, watcher: str) -> ServiceTemplate | None:
    """The template of a worker that may replace that one. None for what is no worker: such a service has one process
    only. Raises UsageError for what cannot be restarted. Pure."""
    component = _restartable(state, blueprint, watcher)
    if not is_worker(component):
        return None
    return blueprint.worker(component.component, component.watcher.revision)


def mark_restart(state: State, blueprint: Blueprint, watcher: str) -> State:
    """Mark a process as one that is to be restarted under its name. Pure. Raises UsageError.

    The entry of a service that could not be started, and is no worker, is claimed again.
    """
    component = _restartable(state, blueprint, watcher)
    if component.holds:
        return restart(state, watcher)
    return claim(state, watcher, role=component.role, cmd=component.cmd, phase="restarting")


@dataclass(frozen=True)
class WorkerRestart:
    """Restarts workers, and other services that hold no client's connection."""

    ports: Ports
    blueprint: Blueprint
    addition: WorkerAddition
    removal: WorkerRemoval

    async def restart(self, change: Restart, limits: DeviceLimits) -> Result:
        """Put a new process in the place of that one. Raises UsageError for what cannot be restarted."""
        try:
            plan = await self._claim_replacement(change, limits)
        except SupervisorError as error:
            return Result(False, change.watcher, str(error))
        if plan is not None:
            return await self.addition.start(plan)
        if not change.even_the_last:
            await self._check_answered(change.watcher)
        await self.ports.update(lambda state: mark_restart(state, self.blueprint, change.watcher))
        return await self.finish(change.watcher)

    async def finish(self, watcher: str) -> Result:
        """End the process of an entry that is marked as restarting, start the next one, and wait until it is ready."""
        await self.removal.end_process(watcher)
        component = entry(await self.ports.read(), watcher)
        template = self.blueprint.restartable(component.component, component.watcher.revision)
        if await self._is_gone(component):
            return await self.addition.undo(watcher, f"node {component.node} is gone")
        inventory = await self.ports.inventory(component.node)
        plan = plan_watcher(template, component.watcher, inventory, component.devices, component.node)
        self.ports.report.step(f"{watcher}  starting again")
        return await self.addition.start_process(plan)

    async def _is_gone(self, component: Component) -> bool:
        """Whether the node of a process that has ended is gone, and not only silent: its process would be unknown."""
        places = self.ports.places
        return component.node not in await places.places() and component.watcher_name not in await places.statuses()

    async def _claim_replacement(self, change: Restart, limits: DeviceLimits) -> WatcherPlan | None:
        """Claim a worker that replaces this one. None if there is no device for it, or if this is no worker."""
        template = template_of_replacement(await self.ports.read(), self.blueprint, change.watcher)
        if template is None:
            return None
        try:
            return await self.addition.claim_new(template, limits, replaces=change.watcher)
        except DeviceError:
            return None

    async def _check_answered(self, watcher: str) -> None:
        """Raise UsageError if no other worker would answer requests while that one restarts."""
        give_up_at = self.ports.clock() + _HEARD_WITHIN_S
        while last_answering(await self._roles(watcher), {watcher}):
            if self.ports.clock() >= give_up_at:
                raise UsageError(
                    f"no device is free for a worker in place of {watcher}, and no other one would answer meanwhile",
                    "free a device, or use --force if that is what you want",
                )
            await self.ports.fleet.changed(_POLL_S)

    async def _roles(self, watcher: str) -> dict[str, str]:
        """The roles of this worker, and of all others of its model that are ready and to stay."""
        state = await self.ports.read()
        revision = entry(state, watcher).watcher.revision
        mine = {name: c for name, c in state.components.items() if c.watcher.revision == revision}
        return {name: c.role for name, c in mine.items() if name == watcher or self._is_ready(c)}

    def _is_ready(self, component: Component) -> bool:
        return component.phase is None and component.lease is not None and self.ports.fleet.is_ready(component.lease)


def _restartable(state: State, blueprint: Blueprint, watcher: str) -> Component:
    component = state.components.get(watcher)
    if component is None or (is_worker(component) and not component.holds):
        raise UsageError(f"there is no process {watcher!r} by now", "look at `dynamo ps`")
    blueprint.restartable(component.component, component.watcher.revision)
    if component.phase is not None:
        raise UsageError(f"{watcher} is {component.phase}", "wait until that is over")
    return component
