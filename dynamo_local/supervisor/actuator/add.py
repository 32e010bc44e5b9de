"""Adding a worker: claim a name and devices, start the process, wait until it is ready. A failure undoes all of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_local.core.errors import BusError, DecodeError, DeviceError, SupervisorError, UsageError
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.core.shares import fits, shown_devices, summed
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.circus.client import STOPPED
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, is_worker
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from dynamo_local.supervisor.server.reports.logs import last_error, size, tail
from state.devices.allocation import allocate, held_by, noun
from state.statefile.model import State
from state.statefile.transitions import claim, in_phase, next_watcher, settle, shares_taken

_ENDED = "it ended"
_POLL_S = 0.2
_LINES_READ = 15


def claim_worker(
    state: State, blueprint: Blueprint, change: AddWorker, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> tuple[State, WatcherPlan]:
    """Claim the name and the devices of one more worker, which is marked as starting. Pure.

    `elsewhere`: devices that others on the machine hold, and who holds them. Raises UsageError for what is no worker of
    this graph, and DeviceError (a UsageError) if no device is free or the budget is spent.
    """
    template = template_of(blueprint, change)
    plan = plan_new_worker(state, blueprint, template, limits, elsewhere)
    cmd = shlex.join(plan.argv)
    claimed = claim(
        state, plan.watcher, role=plan.role, cmd=cmd, devices=plan.devices, share=plan.share, phase="starting"
    )
    return claimed, plan


def plan_new_worker(
    state: State, blueprint: Blueprint, template: ServiceTemplate, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> WatcherPlan:
    """Choose the name and the devices of one more worker. Pure. Raises as `claim_worker`."""
    _check_budget(state, template, limits)
    # Virtual workers compute nothing, and share devices with whoever does.
    others = {} if template.virtual else elsewhere
    taken = shares_taken(state)
    devices = allocate(blueprint.inventory, taken, template.devices, template.service, others, template.share)
    watcher = next_watcher(state, template.service, template.revision)
    return plan_watcher(template, watcher, blueprint.inventory, devices)


def devices_held(state: State) -> float:
    """Devices of all workers together, shares of them added up, including those that start or retire."""
    return summed(component.device_count for component in state.components.values() if is_worker(component))


@dataclass(frozen=True)
class WorkerAddition:
    """Adds workers. `ready_deadline_s`: the time that a worker has to become ready."""

    ports: Ports
    blueprint: Blueprint
    removal: WorkerRemoval
    ready_deadline_s: float

    async def add(self, change: AddWorker, limits: DeviceLimits) -> Result:
        """Add a worker, or leave everything as it was. Raises UsageError for what cannot be added."""
        return await self.start(await self.claim(change, limits))

    async def start(self, plan: WatcherPlan) -> Result:
        """Start a worker that is claimed, and wait until it is ready; undo the claim if it does not become so."""
        log_start = size(self.ports.log_file(plan.name))
        self.ports.report.step(f"{plan.name}  starting{self._on_devices(plan)}")
        try:
            await self._hold_devices(plan)
            await self.ports.watchers.add(plan)
        except (SupervisorError, DeviceError, BusError, DecodeError) as error:
            return await self.undo(plan.name, str(error))
        return await self.await_ready(plan.name, log_start)

    async def await_ready(self, watcher: str, log_start: int = 0) -> Result:
        """Wait until a started process is ready, settle it, and end the one that it replaces; undo it if it fails.

        `log_start`: where the log of this process begins, in bytes.
        """
        failure = await self._failure(watcher)
        if failure is None:
            return await self._settle(watcher)
        error = last_error(tail(self.ports.log_file(watcher), _LINES_READ, after=log_start))
        unexplained = failure == _ENDED and error is None
        return await self.undo(watcher, failure if error is None else f"{failure}: {error}", unexplained=unexplained)

    async def undo(self, watcher: str, why: str, *, unexplained: bool = False) -> Result:
        """End a process that did not become ready, and release its claim."""
        self.ports.report.step(f"{watcher}  {why}; undoing its start")
        await self.removal.undo(watcher)
        return Result(False, watcher, f"{watcher} did not start: {why}", unexplained)

    async def claim(self, change: AddWorker, limits: DeviceLimits) -> WatcherPlan:
        """Claim name and devices of a worker, which `start` is then to start. Raises UsageError as `claim_worker`."""
        planned: list[WatcherPlan] = []
        elsewhere = await self.ports.devices.elsewhere()

        def claimed(state: State) -> State:
            after, plan = claim_worker(state, self.blueprint, change, limits, elsewhere)
            planned.append(plan)
            return after

        await self.ports.update(claimed)
        return planned[-1]

    async def _hold_devices(self, plan: WatcherPlan) -> None:
        """Have the server hold the worker's devices. Raises DeviceError if another server took one of them first."""
        refused = await self.ports.devices.hold_claimed()
        missing = {device_id: who for device_id, who in refused.items() if device_id in plan.devices}
        if missing:
            raise DeviceError(f"a device was taken by somebody else{held_by(self.blueprint.inventory.kind, missing)}")

    async def _failure(self, watcher: str) -> str | None:
        """Wait until the worker is ready, and return None, or until it cannot become ready, and return why."""
        give_up_at = self.ports.clock() + self.ready_deadline_s
        while True:
            self.ports.check_changeable()
            # The statefile before circus: a process that dies between the two is then seen as dead.
            state = await self.ports.read()
            ended = _ended(watcher, await self.ports.watchers.statuses())
            lease = state.components[watcher].lease
            if ended is None and lease is not None and self.ports.fleet.is_ready(lease):
                return None
            if ended is not None:
                return ended
            if self.ports.clock() >= give_up_at:
                return f"not ready within {self.ready_deadline_s:g} s"
            await self.ports.fleet.changed(_POLL_S)

    async def _settle(self, watcher: str) -> Result:
        replaced = (await self.ports.read()).components[watcher].replaces
        state = await self.ports.update(lambda state: settle(state, watcher))
        if replaced is None or replaced not in in_phase(state, "retiring"):
            return Result(True, watcher, "ready")
        self.ports.report.step(f"{watcher}  ready")
        await self.removal.finish(replaced)
        return Result(True, watcher, f"in place of {replaced}")

    def _on_devices(self, plan: WatcherPlan) -> str:
        if not plan.devices:
            return ""
        return f" on {noun(self.blueprint.inventory.kind, len(plan.devices))} {shown_devices(plan.devices, plan.share)}"


def template_of(blueprint: Blueprint, change: AddWorker) -> ServiceTemplate:
    """The template of a worker that is to be added. Raises UsageError for what is no worker of this graph."""
    if change.component is None:
        return blueprint.worker_in(change.role, change.revision)
    template = blueprint.worker(change.component, change.revision)
    if template.role != change.role:
        raise UsageError(f"workers of {template.service} start in the role {template.role}, not {change.role}")
    return template


def _check_budget(state: State, template: ServiceTemplate, limits: DeviceLimits) -> None:
    held, most = devices_held(state), limits.max_devices
    needed = template.device_count
    if most is not None and not fits(held, needed, most):
        raise DeviceError(
            f"one more {template.service} needs {needed:g}, workers hold {held:g}, and may hold {most} devices",
            "raise the budget, or end another worker first",
        )


def _ended(watcher: str, statuses: Mapping[str, str]) -> str | None:
    """The reason why the worker will not become ready, as far as circus knows; None if its process runs."""
    if watcher not in statuses:
        return "it was never started"
    return _ENDED if statuses[watcher] == STOPPED else None
