"""Orders to change workers, as the server carries them out: those of `dynamo scale`, `drain` and `restart`, whose
changes it plans and makes in turn, and those of the planner that acts, each one change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.control.operations import (
    BEGIN_PLANNING,
    DRAIN_WORKER,
    RESTART_WORKERS,
    SCALE,
    TAKE_ACTION,
    Call,
    Handlers,
)
from dynamo_local.control.orders import OrderView
from dynamo_local.core.errors import BusError, DeviceError, DynamoError, UsageError
from dynamo_local.core.fleet.view import last_answering
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import (
    FIRST_OF_MAIN,
    MAIN,
    Watcher,
    endpoint_named,
    endpoint_of,
    parse_revision,
    select_watcher,
    short_watcher,
)
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.core.planning.decision import event_of
from dynamo_local.core.shares import fits, summed
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.actuators import Actuators
from dynamo_local.supervisor.actuator.changes import devices_held
from dynamo_local.supervisor.control.api import Orders
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, is_worker, worker_of
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.upkeep.devices import held_by_others
from state.devices.allocation import allocate, held_by, noun
from state.machine.processes import alive, start_time
from state.statefile.model import Component, Owner, State
from state.statefile.transitions import entries, release, shares_taken


def plan_scaling(
    state: State,
    blueprint: Blueprint,
    targets: Mapping[str, int],
    *,
    even_the_last: bool,
    elsewhere: Mapping[int, str] = MappingProxyType({}),
    victim: str = "",
) -> tuple[Action, ...]:
    """Plan the changes that give each service its number of workers. Removals come first, and free devices for the
    rest. Pure.

    `elsewhere`: devices that others on the machine hold, and who holds them. `victim`: the worker that leaves first;
    otherwise that of the highest suffix does. Raises UsageError for what is not a
    service of workers, for more than there are devices for, and, unless `even_the_last`, for the removal of all workers
    that answer requests.
    """
    removals: list[RemoveWorker] = []
    additions: list[AddWorker] = []
    held = shares_taken(state)
    devices = devices_held(state)
    others: dict[int, str] = {}
    for component, number in targets.items():
        template = blueprint.worker(component, FIRST_OF_MAIN)
        present = [entry for entry in entries(state, component, FIRST_OF_MAIN) if entry.holds]
        leaving = sorted(present, key=lambda entry: entry.watcher_name == victim)[number:]
        removals += [RemoveWorker(entry.watcher_name, entry.role) for entry in reversed(leaving)]
        additions += [AddWorker(template.role, component)] * (number - len(present))
        devices = summed([devices, template.device_count * (number - len(present))])
        if not template.virtual:
            others = {device_id: who for device_id, who in elsewhere.items() if device_id not in held}
    total, kind = blueprint.device_count, blueprint.inventory.kind
    if additions and not fits(0, devices, total - len(others)):
        raise DeviceError(
            f"that takes {devices:g} devices, and there are {total:g} {noun(kind, int(total))}{held_by(kind, others)}",
            "ask for fewer workers",
        )
    if not blueprint.clustered:
        # The cluster packs them itself.
        _check_packing(state, blueprint, {removal.watcher for removal in removals}, additions, elsewhere)
    changes: tuple[Action, ...] = (*removals, *additions)
    if not even_the_last:
        _check_answered(state, changes)
    return changes


def _check_packing(
    state: State,
    blueprint: Blueprint,
    leaving: Collection[str],
    additions: Sequence[AddWorker],
    elsewhere: Mapping[int, str],
) -> None:
    """Raise DeviceError if the free shares of devices are too small for a worker, each being chosen as at its start."""
    for watcher in leaving:
        state = release(state, watcher)
    held = shares_taken(state)
    for change in additions:
        template = blueprint.worker(str(change.component), change.revision)
        others = {} if template.virtual else elsewhere
        found = allocate(blueprint.inventory, held, template.devices, template.service, others, template.share)
        held |= {device: summed([held.get(device, 0), template.share]) for device in found}


def plan_drain(state: State, blueprint: Blueprint, watcher: str, *, even_the_last: bool) -> tuple[Action, ...]:
    """Plan to have one worker less, this one. Pure. Raises UsageError for what is no worker, and as `plan_scaling`."""
    worker = worker_of(state, watcher)
    _check_not_of_endpoint(worker)
    left = sum(entry.holds for entry in entries(state, worker.component, worker.revision)) - 1
    targets = {worker.component: left}
    return plan_scaling(state, blueprint, targets, even_the_last=even_the_last, victim=worker.watcher_name)


def _check_not_of_endpoint(worker: Component) -> None:
    """Raise UsageError for a worker in whose place the server would start another one."""
    endpoint = endpoint_of(worker.revision)
    if endpoint != MAIN:
        raise UsageError(
            f"{worker.watcher_name} is a worker of endpoint {endpoint}, whose number of workers the server keeps",
            f"`dynamo scale {endpoint}=NUMBER` sets that number, and `dynamo restart` replaces the worker",
        )


def _restartable(state: State, blueprint: Blueprint, name: str) -> str:
    """The full name of a watcher. Raises UsageError, which lists services and watchers."""
    services = {(template.service, template.revision) for template in blueprint.templates}
    known = [name for name, c in state.components.items() if (c.component, c.revision) in services]
    return select_watcher(name, known, "service, endpoint or watcher")


def plan_restart(state: State, blueprint: Blueprint, name: str, *, even_the_last: bool) -> tuple[Action, ...]:
    """Plan the restart of a watcher, or of all watchers of a service or an endpoint, the unsuffixed one first. Pure.

    Raises UsageError for what cannot be restarted. Whether other workers answer requests meanwhile is checked by the
    actuator, when their turn comes.
    """
    if of_endpoint := _plan_restart_of_all(state, name, even_the_last=even_the_last):
        return of_endpoint
    own = (template for template in blueprint.templates if endpoint_of(template.revision) in {"", MAIN})
    services = {template.service: template.revision for template in own}
    # The short name of a service's first watcher is the service's own: all its watchers are meant.
    watcher = None if name in services else state.components[_restartable(state, blueprint, name)]
    service, revision = (name, services[name]) if watcher is None else (watcher.component, watcher.revision)
    template = blueprint.restartable(service, revision)
    found = entries(state, service, revision) if watcher is None else (watcher,)
    # A service that is no worker is restarted even if it holds nothing, as it could not be started before.
    present = [entry for entry in found if entry.holds or template not in blueprint.workers]
    if not present:
        raise UsageError(f"{service} has no workers", f"`dynamo scale {service}=1` starts one")
    return tuple(Restart(entry.watcher_name, entry.role, even_the_last) for entry in present)


def _plan_restart_of_all(state: State, endpoint: str, *, even_the_last: bool) -> tuple[Action, ...]:
    """Plan the restart of all workers of an endpoint, except those that end anyway; nothing if it has none. Those of
    the first revision come first. Pure."""
    workers = [c for c in state.components.values() if c.holds and is_worker(c)]
    mine = [c for c in workers if endpoint_of(c.revision) == endpoint and c.phase != "retiring"]
    mine.sort(key=lambda component: (parse_revision(component.revision), component.watcher))
    return tuple(Restart(c.watcher_name, c.role, even_the_last) for c in mine)


@dataclass
class ActingPlanner:
    """The planner of one server that adds and removes workers."""

    namespace: str
    _process: Owner | None = field(default=None, init=False)

    def begin(self, pid: int) -> None:
        """Have the planner of that process act. Raises UsageError while another one does, or if there is none."""
        acting = self._process
        if acting is not None and acting.pid != pid and alive(acting.pid, acting.start_time):
            raise UsageError(
                f"process {acting.pid} is the planner of namespace {self.namespace} already",
                "end it, or use --no-operation (in a graph: --Planner.no-operation=true)",
            )
        started = start_time(pid)
        if started is None:
            raise UsageError(f"there is no process {pid} on the server's machine", "run the planner there")
        self._process = Owner(pid, started)

    def check(self, pid: int) -> None:
        """Raise UsageError if the planner of that process does not act, or has ended."""
        acting = self._process
        if acting is None or acting.pid != pid or not alive(pid, acting.start_time):
            raise UsageError(f"process {pid} is not the planner that acts in namespace {self.namespace}")


class AnyOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""


class WorkerOrder(AnyOrder, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What orders of commands have, and all that the one to drain a worker has."""

    force: bool = False


class ScaleOrder(WorkerOrder, frozen=True, kw_only=True, forbid_unknown_fields=True):
    targets: dict[str, Annotated[int, msgspec.Meta(ge=0, le=9999)]]
    ready_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class RestartOrder(WorkerOrder, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    ready_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class PlannerOrder(AnyOrder, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pid: int
    action: Action
    why: str = ""
    max_devices: int | None = None
    ready_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class PlannerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int


Plan = Callable[[State, Blueprint], tuple[Action, ...]]


@dataclass(frozen=True)
class WorkerOrders:
    """Takes orders to change the workers of a server. What they refuse is known, and told, only when their turn comes:
    it depends on the changes before. `record`: notes an event."""

    actuators: Actuators
    bus: Bus
    orders: Orders
    record: Callable[[Event], None]
    planner: ActingPlanner

    @property
    def handlers(self) -> Handlers:
        return {
            SCALE: self.scale,
            DRAIN_WORKER: self.drain,
            RESTART_WORKERS: self.restart,
            BEGIN_PLANNING: self.begin_planning,
            TAKE_ACTION: self.take_action,
        }

    async def scale(self, call: Call) -> OrderView:
        """Give each service its number of workers. Stops at the first change that fails."""
        order = call.content(ScaleOrder)

        def plan(state: State, blueprint: Blueprint) -> tuple[Action, ...]:
            elsewhere = held_by_others(blueprint, state)
            return plan_scaling(state, blueprint, order.targets, even_the_last=order.force, elsewhere=elsewhere)

        make = partial(self._make_planned, plan, "`dynamo scale`")
        return self._begin("scale", call, order, make, order.ready_timeout_s, MAIN)

    async def drain(self, call: Call) -> OrderView:
        """End one worker in order."""
        order = call.content(WorkerOrder)
        plan = partial(plan_drain, watcher=call.names["watcher"], even_the_last=order.force)
        return self._begin("drain", call, order, partial(self._make_planned, plan, "`dynamo drain`"), endpoint=MAIN)

    async def restart(self, call: Call) -> OrderView:
        """Restart a watcher, or all of a service or an endpoint, one after the other. Stops at the first that fails."""
        order = call.content(RestartOrder)
        plan = partial(plan_restart, name=order.name, even_the_last=order.force)
        make = partial(self._make_planned, plan, "`dynamo restart`")
        endpoint = endpoint_named(order.name) or await asyncio.to_thread(self._endpoint_of, order.name)
        return self._begin("restart", call, order, make, order.ready_timeout_s, endpoint)

    async def begin_planning(self, call: Call) -> dict[str, Any]:
        """Have a planner be the only one that acts."""
        planner = call.content(PlannerProcess)
        self.planner.begin(planner.pid)
        return {"object": "planner", "pid": planner.pid}

    async def take_action(self, call: Call) -> OrderView:
        """Make a change that the acting planner has decided."""
        order = call.content(PlannerOrder)
        check = partial(self.planner.check, order.pid)
        check()
        limits, why = DeviceLimits(order.max_devices), f"planner: {order.why}"

        async def make(actuator: LocalActuator, _: Report) -> Sequence[ActionOutcome]:
            # Another planner, or whoever ended this one, knows nothing of a change that has not begun.
            return (await self._make(order.action, limits, why, actuator, check),)

        return self._begin("planner", call, order, make, order.ready_timeout_s, MAIN)

    def _endpoint_of(self, name: str) -> str:
        """The endpoint of the workers of a service of the graph, or of one of its watchers. Blocks."""
        service = short_watcher(name).partition("_")[0]
        namespace = self.actuators.machinery.launch.graph.namespace
        return self.actuators.machinery.blueprint.current().endpoint_of(Watcher(namespace, service))

    def _begin(
        self,
        command: str,
        call: Call,
        order: AnyOrder,
        make: Callable[[LocalActuator, Report], Awaitable[Sequence[ActionOutcome]]],
        ready_deadline_s: float | None = None,
        endpoint: str = "",
    ) -> OrderView:
        if not self.bus.connected and not self.orders.knows(order.id):
            raise BusError("the bus does not answer", "NATS may be starting again: see `dynamo ps`")

        async def work(report: Report) -> list[dict[str, Any]]:
            actuator = await self.actuators.of(endpoint, report, ready_deadline_s=ready_deadline_s)
            return [_fields(outcome) for outcome in await make(actuator, report)]

        return self.orders.begin(command, call, order.id, work)

    async def _make_planned(
        self, plan: Plan, why: str, actuator: LocalActuator, report: Report
    ) -> Sequence[ActionOutcome]:
        """Make the changes that are planned, in turn, up to the first that fails."""
        for note in await actuator.reconcile():
            report.step(note)
        machinery = self.actuators.machinery
        blueprint = await asyncio.to_thread(machinery.blueprint.current)
        state = await asyncio.to_thread(machinery.store.read)
        outcomes: list[ActionOutcome] = []
        for change in await asyncio.to_thread(plan, state, blueprint):
            outcomes.append(outcome := await self._make(change, DeviceLimits(), why, actuator))
            if not outcome.done:
                break
            note = " ".join(map(short_watcher, outcome.note.split(" ")))
            report.step(f"{outcome.watcher}  {note} after {outcome.took_s:.1f} s")
        return outcomes

    async def _make(
        self,
        change: Action,
        limits: DeviceLimits,
        why: str,
        actuator: LocalActuator,
        check: Callable[[], None] = lambda: None,
    ) -> ActionOutcome:
        """Make a change, and record it. `why`: who has ordered it, or for what reasons."""
        try:
            outcome = await actuator.apply(change, limits, check)
        except DynamoError as error:
            self.record(event_of(ActionOutcome(change, False, None, str(error), 0.0), why))
            raise
        self.record(event_of(outcome, why))
        return outcome


def _fields(outcome: ActionOutcome) -> dict[str, Any]:
    return {
        "action": type(outcome.action).__name__,
        "watcher": outcome.watcher,
        "done": outcome.done,
        "note": outcome.note,
        "took_s": round(outcome.took_s, 3),
    }


def _check_answered(state: State, changes: Sequence[Action]) -> None:
    roles = {c.watcher_name: c.role for c in state.components.values() if c.holds and endpoint_of(c.revision) == MAIN}
    # An added worker has no name yet.
    roles |= {f"added {n}": change.role for n, change in enumerate(changes) if isinstance(change, AddWorker)}
    leaving = {change.watcher for change in changes if isinstance(change, RemoveWorker)}
    if last := last_answering(roles, leaving):
        raise UsageError(
            f"no worker would be left to answer requests without {', '.join(last)}",
            "use --force if that is what you want",
        )
