"""Changes of a worker: adding, removing and restarting one. Each is a claim in the statefile, then steps at a place.

A crash may follow any of the steps: repeated from the first, they complete a removal; what else is half done is in the
table of steps.py. An addition that fails is undone. A restart puts another process in the place of the old one where a
device is free, and starts one under the same name where none is:

    another one    starting, with the name that it replaces    kept, or undone: the old one has lost nothing
                   (ready) the old one is retiring             ended, removed, released
    the same name  restarting                                  ended, removed, started on the same devices, awaited

Repeated after a crash, each goes on; a process that was being started again is then started once more.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo_local.core.errors import (
    BusError,
    DeviceError,
    NodeStartError,
    NotRunningError,
    StateError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.fleet.view import WORKER_ROLES, last_answering
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.core.shares import fits, shown_devices, summed
from dynamo_local.supervisor.places.local import Books
from dynamo_local.supervisor.places.port import Need, Places, Status
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, is_worker, worker_of
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import Inventory, noun
from state.statefile.model import Component, State
from state.statefile.transitions import (
    claim,
    clear_lease,
    entry,
    in_phase,
    next_watcher,
    release,
    restart,
    retire,
    settle,
)


class Fleet(Protocol):
    """The workers that are ready, by their presences on the bus."""

    def is_ready(self, lease: str) -> bool:
        """Whether the process of that lease is ready: a worker then takes requests, or prefill jobs."""

    async def revoke(self, lease: str, revision: str) -> None:
        """Have the routers send nothing to that worker of a revision from now on. Raises BusError."""

    async def changed(self, within_s: float) -> None:
        """Wait until a presence changes, or until the time is over."""


@dataclass(frozen=True)
class Ports:
    """The ports of one actuator.

    `namespace`: of the server whose processes are changed. `lock`: held for the time of a change, by all actuators of
    the same processes. `change_role(watcher, role)`: has a worker take up a role, or raises UsageError. `clock`:
    seconds.
    """

    namespace: str
    books: Books
    places: Places
    fleet: Fleet
    lock: asyncio.Lock
    change_role: Callable[[str, str], Awaitable[object]]
    report: Report
    clock: Callable[[], float]

    async def inventory(self, node: str) -> Inventory:
        """The devices of a node. Raises SupervisorError if it does not answer."""
        places = await self.places.places()
        if node not in places:
            raise SupervisorError(f"node {node} does not answer", "what runs there is unknown until it does")
        return places[node].inventory


@dataclass(frozen=True)
class Result:
    """The result of a change, of which `LocalActuator.apply` makes an ActionOutcome."""

    done: bool
    watcher: str | None
    note: str
    unexplained: bool = False
    node_failed: bool = False


UNDO_S = 5.0
"""The time that a process has to end by itself if it never became ready: it has no requests to finish."""

_HEARD_WITHIN_S = 1.5
"""Three heartbeats: every worker that runs has been heard on the bus by then."""

_ENDED = "it ended"
_POLL_S = 0.2


class WorkerChanges:
    """Makes changes of workers, and restarts other services that hold no client's connection. `ready_deadline_s`: the
    time that a process which is started has to become ready."""

    def __init__(self, ports: Ports, blueprint: Blueprint, ready_deadline_s: float) -> None:
        self._ports = ports
        self._blueprint = blueprint
        self._ready_deadline_s = ready_deadline_s
        self._books = ports.books

    async def add(self, change: AddWorker, limits: DeviceLimits) -> Result:
        """Add a worker, or leave everything as it was. Raises UsageError for what cannot be added."""
        try:
            plan = await self.claim(change, limits)
        except SupervisorError as error:
            return Result(False, None, str(error), node_failed=isinstance(error, NodeStartError))
        return await self.start(plan)

    async def start(self, plan: WatcherPlan) -> Result:
        """Start a worker that is claimed, and wait until it is ready; undo the claim if it does not become so."""
        self._ports.report.step(f"{plan.name}  starting{self._on_devices(plan)}")
        return await self._start_process(plan)

    async def _start_process(self, plan: WatcherPlan) -> Result:
        """Start a claimed process, and wait as `await_ready`."""
        try:
            await self._ports.places.start(plan)
        except NotRunningError:
            raise
        except (SupervisorError, UsageError, StateError) as error:
            # A node refuses what it cannot run, such as a model that it lacks; its own statefile may be out of order.
            return await self._undo(plan.name, str(error))
        return await self.await_ready(plan.name)

    async def await_ready(self, watcher: str) -> Result:
        """Wait until a started process is ready, settle it, and end the one that it replaces; undo it if it fails."""
        failure = await self._failure(watcher)
        if failure is None:
            return await self._settle(watcher)
        error = await self._ports.places.last_error(watcher)
        unexplained = failure == _ENDED and error is None
        return await self._undo(watcher, failure if error is None else f"{failure}: {error}", unexplained=unexplained)

    async def _undo(self, watcher: str, why: str, *, unexplained: bool = False) -> Result:
        """End a process that did not become ready, and release its claim."""
        self._ports.report.step(f"{watcher}  {why}; undoing its start")
        await self._books.update(lambda state: retire(state, watcher))
        await self.finish_removal(watcher, UNDO_S)
        return Result(False, watcher, f"{watcher} did not start: {why}", unexplained)

    async def claim(self, change: AddWorker, limits: DeviceLimits) -> WatcherPlan:
        """Reserve what a worker needs, and claim it; `start` is then to start it. Raises UsageError for what is no
        worker of this graph, DeviceError (a UsageError) if no device is free or the budget is spent,
        SupervisorError if the place does not answer."""
        return await self._claim_new(template_of(self._blueprint, change), limits, node=change.node)

    async def _claim_new(
        self, template: ServiceTemplate, limits: DeviceLimits, replaces: str | None = None, node: str = ""
    ) -> WatcherPlan:
        """As `claim`, for a worker of that service, which may replace another one."""
        state = await self._books.read()
        check_budget(state, template, limits)
        watcher = next_watcher(state, template.service, template.revision)
        reservation = await self._ports.places.reserve(watcher, need_of(template, node))
        try:
            inventory = await self._ports.inventory(reservation.node)
            plan = plan_watcher(template, watcher, inventory, reservation.devices, reservation.node)
            await self._books.update(lambda state: claim_reserved(state, template, plan, limits, replaces))
        except (DeviceError, StateError, SupervisorError):
            await self._ports.places.release(str(watcher))
            raise
        return plan

    async def _failure(self, watcher: str) -> str | None:
        """Wait until the worker is ready, and return None, or until it cannot become ready, and return why."""
        give_up_at = self._ports.clock() + self._ready_deadline_s
        while True:
            # The statefile before circus: a process that dies between the two is then seen as dead.
            state = await self._books.read()
            found = entry(state, watcher)
            ended, lease = _ended(watcher, found.node, await self._ports.places.statuses()), found.lease
            if ended is None and lease is not None and self._ports.fleet.is_ready(lease):
                return None
            if ended is not None:
                return ended
            if self._ports.clock() >= give_up_at:
                return f"not ready within {self._ready_deadline_s:g} s"
            await self._ports.fleet.changed(_POLL_S)

    async def _settle(self, watcher: str) -> Result:
        replaced = entry(await self._books.read(), watcher).replaces
        state = await self._books.update(lambda state: settle(state, watcher))
        if replaced is None or replaced not in in_phase(state, "retiring"):
            return Result(True, watcher, "ready")
        self._ports.report.step(f"{watcher}  ready")
        await self.finish_removal(replaced)
        return Result(True, watcher, f"in place of {replaced}")

    def _on_devices(self, plan: WatcherPlan) -> str:
        if not plan.devices:
            return ""
        where = "" if plan.node == LOCAL_NODE else f" of node {plan.node}"
        devices = noun(self._blueprint.inventory.kind, len(plan.devices))
        return f" on {devices} {shown_devices(plan.devices, plan.share)}{where}"

    async def remove(self, change: RemoveWorker) -> Result:
        """End a worker in order. Raises UsageError for what is no worker."""
        await self._books.update(lambda state: retire_worker(state, change))
        await self.finish_removal(change.watcher)
        return Result(True, change.watcher, "ended")

    async def finish_removal(self, watcher: str, deadline_s: float | None = None) -> None:
        """End a worker that is marked as retiring, and release its devices."""
        await self._end(watcher, self._blueprint.drain_deadline_s if deadline_s is None else deadline_s)
        await self._books.update(lambda state: release(state, watcher))
        try:
            await self._ports.places.release(watcher)
        except SupervisorError as error:
            # Not fatal: the worker has ended, and a reservation that nobody has claimed is released by the reconciler.
            self._ports.report.step(f"{watcher}  reservation not released yet: {error}")

    async def _end_process(self, watcher: str) -> None:
        """End the process of an entry that is marked as restarting. The entry keeps its name and devices."""
        await self._end(watcher, self._blueprint.drain_deadline_s)
        # It must not be taken for the next one. It may have announced itself only after it was told to end, so the
        # statefile is read again.
        await self._books.update(lambda state: _without_lease(state, watcher))

    async def end_unclaimed(self, watcher: str) -> None:
        """End and remove a watcher that has no claim in the statefile."""
        await self._ports.places.end(watcher, UNDO_S)
        await self._ports.places.release(watcher)

    async def _end(self, watcher: str, deadline_s: float) -> None:
        component = entry(await self._books.read(), watcher)
        await self._revoke(component)
        await self._ports.places.end(watcher, deadline_s)

    async def _revoke(self, component: Component) -> None:
        """Have the routers send no more requests to the worker."""
        # A prefill worker takes its jobs from the queue itself, and stops doing so when it is told to end.
        if component.lease is None or component.role not in WORKER_ROLES:
            return
        self._ports.report.step(f"{component.watcher_name}  gets no more requests")
        try:
            await self._ports.fleet.revoke(component.lease, component.revision)
        except BusError as error:
            # Not fatal: the worker announces that it drains as soon as it is told to end.
            self._ports.report.step(f"{component.watcher_name}  lease not revoked: {error}")

    async def restart(self, change: Restart, limits: DeviceLimits) -> Result:
        """Put a new process in the place of that one. Raises UsageError for what cannot be restarted."""
        try:
            plan = await self._claim_replacement(change, limits)
        except SupervisorError as error:
            return Result(False, change.watcher, str(error))
        if plan is not None:
            return await self.start(plan)
        if not change.even_the_last:
            await self._check_answered(change.watcher)
        await self._books.update(lambda state: mark_restart(state, self._blueprint, change.watcher))
        return await self.finish_restart(change.watcher)

    async def finish_restart(self, watcher: str) -> Result:
        """End the process of an entry that is marked as restarting, start the next one, and wait until it is ready."""
        await self._end_process(watcher)
        component = entry(await self._books.read(), watcher)
        template = self._blueprint.restartable(component.component, component.revision)
        if await self._is_gone(component):
            return await self._undo(watcher, f"node {component.node} is gone")
        inventory = await self._ports.inventory(component.node)
        plan = plan_watcher(template, component.watcher, inventory, component.devices, component.node)
        self._ports.report.step(f"{watcher}  starting again")
        return await self._start_process(plan)

    async def _is_gone(self, component: Component) -> bool:
        """Whether the node of a process that has ended is gone, and not only silent: its process would be unknown."""
        places = self._ports.places
        return component.node not in await places.places() and component.watcher_name not in await places.statuses()

    async def _claim_replacement(self, change: Restart, limits: DeviceLimits) -> WatcherPlan | None:
        """Claim a worker that replaces this one. None if there is no device for it, or if this is no worker."""
        template = template_of_replacement(await self._books.read(), self._blueprint, change.watcher)
        if template is None:
            return None
        try:
            return await self._claim_new(template, limits, replaces=change.watcher)
        except DeviceError:
            return None

    async def _check_answered(self, watcher: str) -> None:
        """Raise UsageError if no other worker would answer requests while that one restarts."""
        give_up_at = self._ports.clock() + _HEARD_WITHIN_S
        while last_answering(await self._roles(watcher), {watcher}):
            if self._ports.clock() >= give_up_at:
                raise UsageError(
                    f"no device is free for a worker in place of {watcher}, and no other one would answer meanwhile",
                    "free a device, or use --force if that is what you want",
                )
            await self._ports.fleet.changed(_POLL_S)

    async def _roles(self, watcher: str) -> dict[str, str]:
        """The roles of this worker, and of all others of its model that are ready and to stay."""
        state = await self._books.read()
        revision = entry(state, watcher).revision
        mine = {name: c for name, c in state.components.items() if c.revision == revision}
        return {name: c.role for name, c in mine.items() if name == watcher or self._is_ready(c)}

    def _is_ready(self, component: Component) -> bool:
        return component.phase is None and component.lease is not None and self._ports.fleet.is_ready(component.lease)


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
        revision=plan.revision,
    )


def devices_held(state: State) -> float:
    """Devices of all workers together, shares of them added up, including those that start or retire."""
    return summed(component.device_count for component in state.components.values() if is_worker(component))


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
    return Need(
        template.role, template.devices, template.share, template.virtual, node=node, revision=template.revision
    )


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


def retire_worker(state: State, change: RemoveWorker) -> State:
    """Mark a worker as retiring. Pure. Raises UsageError for what is no worker, or has another role by now."""
    component = worker_of(state, change.watcher)
    if component.role != change.role:
        raise UsageError(f"{change.watcher} has the role {component.role} by now, not {change.role}")
    return retire(state, change.watcher)


def template_of_replacement(state: State, blueprint: Blueprint, watcher: str) -> ServiceTemplate | None:
    """The template of a worker that may replace that one. None for what is no worker: such a service has one process
    only. Raises UsageError for what cannot be restarted. Pure."""
    component = _restartable(state, blueprint, watcher)
    if not is_worker(component):
        return None
    return blueprint.worker(component.component, component.revision)


def mark_restart(state: State, blueprint: Blueprint, watcher: str) -> State:
    """Mark a process as one that is to be restarted under its name. Pure. Raises UsageError.

    The entry of a service that could not be started, and is no worker, is claimed again.
    """
    component = _restartable(state, blueprint, watcher)
    if component.holds:
        return restart(state, watcher)
    revision = component.revision
    return claim(state, watcher, role=component.role, cmd=component.cmd, phase="restarting", revision=revision)


def _restartable(state: State, blueprint: Blueprint, watcher: str) -> Component:
    component = state.components.get(watcher)
    if component is None or (is_worker(component) and not component.holds):
        raise UsageError(f"there is no process {watcher!r} by now", "look at `dynamo ps`")
    blueprint.restartable(component.component, component.revision)
    if component.phase is not None:
        raise UsageError(f"{watcher} is {component.phase}", "wait until that is over")
    return component


def _without_lease(state: State, watcher: str) -> State:
    lease = entry(state, watcher).lease
    return state if lease is None else clear_lease(state, watcher, lease)
