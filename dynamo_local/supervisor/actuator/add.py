"""Adding a worker: claim a name and devices, start the process, wait until it is ready. A failure undoes all of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo_local.core.errors import (
    DeviceError,
    NodeStartError,
    NotRunningError,
    StateError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.core.shares import fits, shown_devices, summed
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.places.local import reserve_here
from dynamo_local.supervisor.places.port import Need, Status
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, is_worker
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from state.devices.allocation import noun
from state.statefile.model import State
from state.statefile.transitions import claim, entry, in_phase, next_watcher, settle

_ENDED = "it ended"
_POLL_S = 0.2


def claim_worker(
    state: State, blueprint: Blueprint, change: AddWorker, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> tuple[State, WatcherPlan]:
    """Reserve and claim one more worker on this machine, as `WorkerAddition.claim` does. Pure.

    `elsewhere`: devices that others on the machine hold, and who holds them. Raises UsageError for what is no worker of
    this graph, and DeviceError (a UsageError) if no device is free or the budget is spent.
    """
    template = template_of(blueprint, change)
    check_budget(state, template, limits)
    watcher = next_watcher(state, template.service, template.revision)
    state, reservation = reserve_here(state, blueprint.inventory, watcher, need_of(template), elsewhere)
    plan = plan_watcher(template, watcher, blueprint.inventory, reservation.devices)
    return claim_reserved(state, template, plan, limits), plan


def claim_reserved(
    state: State, template: ServiceTemplate, plan: WatcherPlan, limits: DeviceLimits, replaces: str | None = None
) -> State:
    """Claim a planned worker, whose devices are reserved. It is marked as starting. Pure.

    `replaces`: the worker that is to end once this one is ready, and whose role this one gets. Raises DeviceError if
    the budget is spent by now.
    """
    name = plan.name
    others = {other: component for other, component in state.components.items() if other != name}
    check_budget(msgspec.structs.replace(state, components=others), template, limits)
    return claim(
        state,
        plan.watcher,
        role=plan.role if replaces is None else entry(state, replaces).role,
        cmd=shlex.join(plan.argv),
        devices=plan.devices,
        share=plan.share,
        phase="starting",
        replaces=replaces,
        node=plan.node,
    )


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
        try:
            plan = await self.claim(change, limits)
        except SupervisorError as error:
            return Result(False, None, str(error), node_failed=isinstance(error, NodeStartError))
        return await self.start(plan)

    async def start(self, plan: WatcherPlan) -> Result:
        """Start a worker that is claimed, and wait until it is ready; undo the claim if it does not become so."""
        self.ports.report.step(f"{plan.name}  starting{self._on_devices(plan)}")
        return await self.start_process(plan)

    async def start_process(self, plan: WatcherPlan) -> Result:
        """Start a claimed process, and wait as `await_ready`."""
        try:
            await self.ports.places.start(plan)
        except NotRunningError:
            raise
        except (SupervisorError, UsageError, StateError) as error:
            # A node refuses what it cannot run, such as a model that it lacks; its own statefile may be out of order.
            return await self.undo(plan.name, str(error))
        return await self.await_ready(plan.name)

    async def await_ready(self, watcher: str) -> Result:
        """Wait until a started process is ready, settle it, and end the one that it replaces; undo it if it fails."""
        failure = await self._failure(watcher)
        if failure is None:
            return await self._settle(watcher)
        error = await self.ports.places.last_error(watcher)
        unexplained = failure == _ENDED and error is None
        return await self.undo(watcher, failure if error is None else f"{failure}: {error}", unexplained=unexplained)

    async def undo(self, watcher: str, why: str, *, unexplained: bool = False) -> Result:
        """End a process that did not become ready, and release its claim."""
        self.ports.report.step(f"{watcher}  {why}; undoing its start")
        await self.removal.undo(watcher)
        return Result(False, watcher, f"{watcher} did not start: {why}", unexplained)

    async def claim(self, change: AddWorker, limits: DeviceLimits) -> WatcherPlan:
        """Reserve what a worker needs, and claim it; `start` is then to start it. Raises UsageError as `claim_worker`,
        SupervisorError if the place does not answer."""
        return await self.claim_new(template_of(self.blueprint, change), limits, node=change.node)

    async def claim_new(
        self, template: ServiceTemplate, limits: DeviceLimits, replaces: str | None = None, node: str = ""
    ) -> WatcherPlan:
        """As `claim`, for a worker of that service, which may replace another one."""
        state = await self.ports.read()
        check_budget(state, template, limits)
        watcher = next_watcher(state, template.service, template.revision)
        reservation = await self.ports.places.reserve(watcher, need_of(template, node))
        try:
            inventory = await self.ports.inventory(reservation.node)
            plan = plan_watcher(template, watcher, inventory, reservation.devices, reservation.node)
            await self.ports.update(lambda state: claim_reserved(state, template, plan, limits, replaces))
        except (DeviceError, StateError, SupervisorError):
            await self.ports.places.release(str(watcher))
            raise
        return plan

    async def _failure(self, watcher: str) -> str | None:
        """Wait until the worker is ready, and return None, or until it cannot become ready, and return why."""
        give_up_at = self.ports.clock() + self.ready_deadline_s
        while True:
            # The statefile before circus: a process that dies between the two is then seen as dead.
            state = await self.ports.read()
            found = entry(state, watcher)
            ended, lease = _ended(watcher, found.node, await self.ports.places.statuses()), found.lease
            if ended is None and lease is not None and self.ports.fleet.is_ready(lease):
                return None
            if ended is not None:
                return ended
            if self.ports.clock() >= give_up_at:
                return f"not ready within {self.ready_deadline_s:g} s"
            await self.ports.fleet.changed(_POLL_S)

    async def _settle(self, watcher: str) -> Result:
        replaced = entry(await self.ports.read(), watcher).replaces
        state = await self.ports.update(lambda state: settle(state, watcher))
        if replaced is None or replaced not in in_phase(state, "retiring"):
            return Result(True, watcher, "ready")
        self.ports.report.step(f"{watcher}  ready")
        await self.removal.finish(replaced)
        return Result(True, watcher, f"in place of {replaced}")

    def _on_devices(self, plan: WatcherPlan) -> str:
        if not plan.devices:
            return ""
        where = "" if plan.node == LOCAL_NODE else f" of node {plan.node}"
        devices = noun(self.blueprint.inventory.kind, len(plan.devices))
        return f" on {devices} {shown_devices(plan.devices, plan.share)}{where}"


def template_of(blueprint: Blueprint, change: AddWorker) -> ServiceTemplate:
    """The template of a worker that is to be added. Raises UsageError for what is no worker of this graph."""
    if change.component is None:
        return blueprint.worker_in(change.role, change.revision)
    template = blueprint.worker(change.component, change.revision)
    if template.role != change.role:
        raise UsageError(f"workers of {template.service} start in the role {template.role}, not {change.role}")
    return template


def need_of(template: ServiceTemplate, node: str = "") -> Need:
    """What each process of a service needs, on that node if one is given."""
    return Need(template.role, template.devices, template.share, template.virtual, node=node)


def check_budget(state: State, template: ServiceTemplate, limits: DeviceLimits) -> None:
    """Raise DeviceError if the budget is spent. Pure."""
    held, most = devices_held(state), limits.max_devices
    needed = template.device_count
    if most is not None and not fits(held, needed, most):
        raise DeviceError(
            f"one more {template.service} needs {needed:g}, workers hold {held:g}, and may hold {most} devices",
            "raise the budget, or end another worker first",
        )


def _ended(watcher: str, node: str, statuses: Mapping[str, Status]) -> str | None:
    """The reason why the worker will not become ready, as far as its place knows; None if its process runs, or may."""
    if watcher not in statuses:
        return "it was never started" if node == LOCAL_NODE else f"nothing of it runs on node {node}"
    return _ENDED if statuses[watcher] == "stopped" else None
