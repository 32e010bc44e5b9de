"""Orders about endpoints: each is checked, and written into the registry, before it is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo_local.core.endpoints import registry as registries
from dynamo_local.core.endpoints.checks import (
    REPLACE,
    ROLL,
    changed_spec,
    fields_alone,
    read_spec,
    runs_differently,
    ways_of,
)
from dynamo_local.core.endpoints.refusals import refusal_of
from dynamo_local.core.endpoints.registry import Entry, Registry
from dynamo_local.core.endpoints.served import check_names
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DynamoError, EndpointConflictError, UsageError
from dynamo_local.core.messages.endpoints import (
    AdapterOrdered,
    CreateEndpoint,
    DeleteEndpoint,
    EndpointOrder,
    EndpointsAnswer,
    EndpointView,
    ListEndpoints,
    ParkEndpoint,
    ScaleEndpoint,
    UpdateEndpoint,
    WakeEndpoint,
)
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.rolled_bases import Base, RolledBases


class Endpoints(Protocol):
    """The endpoints of a server, as orders need them (controller.EndpointController)."""

    def run_of(self, name: str) -> EndpointRun | None:
        """What runs for the endpoint; None for an adapter, and where there is none of that name."""

    def begin(self, entry: Entry) -> None:
        """Bring up an endpoint that was created."""

    def view(self, name: str) -> EndpointView | None:
        """The endpoint of that name as it is now, also while it is being deleted; None if there is none."""

    def views(self) -> tuple[EndpointView, ...]:
        """All endpoints as they are now, those included that are being deleted."""


@dataclass(frozen=True)
class Orders:
    """Carries out orders, one at a time.

    `check_machine(spec, others)` raises UsageError if there are too few devices for the endpoint,
    `check_update(run, spec)` if no worker of another revision can be started beside the present one, and
    `check_wake(run)` if an endpoint has no device to wake on. `own_names`: names of models that the graph itself
    serves. `happened(endpoint, what, why)`: for the event log and the terminal.
    """

    kept: KeptRegistry
    endpoints: Endpoints
    adapters: AdapterFolders
    check_machine: Callable[[EndpointSpec, Sequence[EndpointSpec]], Awaitable[None]]
    check_update: Callable[[EndpointRun, EndpointSpec], Awaitable[None]]
    check_wake: Callable[[EndpointRun], Awaitable[None]]
    own_names: frozenset[str]
    happened: Callable[[str, str, str], None]
    wall_clock: Callable[[], float]

    @property
    def _bases(self) -> RolledBases:
        return RolledBases(self.kept, self.adapters, self.endpoints.run_of, self.check_update, self.happened)

    async def answer(self, order: EndpointOrder) -> EndpointsAnswer:
        """Carry out an order. One that cannot be is refused, and has changed nothing."""
        ordered: AdapterOrdered | None = None
        try:
            match order:
                case ListEndpoints():
                    return self._list(order.name)
                case CreateEndpoint():
                    name, ordered = await self._create(order)
                case UpdateEndpoint():
                    name, ordered = await self._update(order)
                case ScaleEndpoint():
                    name = self._scale(order)
                case ParkEndpoint():
                    name = self._park(order)
                case WakeEndpoint():
                    name = await self._wake(order)
                case DeleteEndpoint():
                    return await self._delete(order)
        except DynamoError as error:
            return EndpointsAnswer(refused=refusal_of(error))
        return self._list(name) if ordered is None else self._told(name, ordered)

    def _told(self, name: str, ordered: AdapterOrdered) -> EndpointsAnswer:
        (view,) = self._list(name).endpoints
        return EndpointsAnswer((msgspec.structs.replace(view, adapter=ordered),))

    def _list(self, name: str | None) -> EndpointsAnswer:
        if name is None:
            return EndpointsAnswer(self.endpoints.views())
        found = self.endpoints.view(name)
        if found is None:
            self.kept.current.entry(name)  # raises, with names that are similar
        return EndpointsAnswer(() if found is None else (found,))

    async def _create(self, order: CreateEndpoint) -> tuple[str, AdapterOrdered | None]:
        spec, ways = read_spec(fields_alone(order.spec)), ways_of(order.spec)
        if spec.adapter_of is None:
            _check_no_ways(spec, replace=ways.replace, roll=ways.roll)
        run = self.endpoints.run_of(spec.name)
        if run is not None and run.deleting:
            raise EndpointConflictError(f"endpoint {spec.name} is still being deleted", "try again in a moment")
        if spec.name not in self.kept.current.entries:
            await self._check(spec)
        registries.create(self.kept.current, spec, self.wall_clock())  # raises
        base = await self._bases.find(spec, ways)
        registry = await self._change(lambda registry: registries.create(registry, spec, self.wall_clock()), base)
        self.endpoints.begin(registry.entry(spec.name))
        self.happened(spec.name, f"created: model {spec.model}", "")
        return spec.name, None if base is None else self._bases.roll(base, registry, ways)

    async def _update(self, order: UpdateEndpoint) -> tuple[str, AdapterOrdered | None]:
        before = self.kept.current.entry(order.name)
        spec, ways = changed_spec(before.spec, order.changes), ways_of(order.changes)
        await self._check(spec)
        run = self.endpoints.run_of(order.name)
        if run is not None:
            _check_no_ways(spec, roll=ways.roll)
            spec = self.adapters.with_room(spec, self.adapters.ranks(self.kept.current, spec.name))
        if run is not None and runs_differently(before.spec, spec) and run.answers and not ways.replace:
            await self.check_update(run, spec)
        base = await self._bases.find(spec, ways)
        registry = await self._change(lambda registry: self._updated(registry, spec, run), base)
        entry = registry.entry(order.name)
        if run is not None:
            run.order(entry, replace=ways.replace)
        if entry.revision != before.revision:
            self.happened(order.name, f"update to revision {entry.revision} began", "")
        return order.name, None if base is None else self._bases.roll(base, registry, ways)

    async def _change(self, change: Callable[[Registry], Registry], base: Base | None) -> Registry:
        """Change the registry, and give the base of an adapter its room, in one."""
        if base is None or not base.lacks:
            return await self.kept.change(change)
        return await self.kept.change(lambda registry: self._updated(change(registry), base.spec, base.run))

    def _updated(self, registry: Registry, spec: EndpointSpec, run: EndpointRun | None) -> Registry:
        name = spec.name
        if run is not None and run.answers:
            # It answers already, and that is only to be recorded.
            registry = registries.settle(registry, name, run.entry.revision)
        was_first = registry.entry(name).earlier is None and (run is None or run.takes is None)
        after = registries.update(registry, spec, self.wall_clock())
        # There is no going back to a revision that has never answered.
        return registries.settle(after, name, after.entry(name).revision) if was_first else after

    def _scale(self, order: ScaleEndpoint) -> str:
        spec = self.kept.current.entry(order.name).spec
        run = self.endpoints.run_of(order.name)
        if run is None:
            raise UsageError(f"endpoint {order.name} is an adapter", f"scale {spec.adapter_of}, which serves it")
        if run.idleness.rest == "asleep" and order.workers != 0:
            raise EndpointConflictError(
                f"endpoint {order.name} is asleep", f"wake it first: dynamo endpoint wake {order.name}"
            )
        _check_bounds(order.name, "workers", order.workers, spec.min_workers, spec.most_workers)
        least = spec.min_prefill_workers if spec.disaggregated else 0
        _check_bounds(order.name, "prefill workers", order.prefill_workers, least, spec.most_prefill_workers)
        run.scale(order.workers, order.prefill_workers)
        return order.name

    def _park(self, order: ParkEndpoint) -> str:
        spec = self.kept.current.entry(order.name).spec
        run = self.endpoints.run_of(order.name)
        if run is None:
            raise EndpointConflictError(
                f"endpoint {order.name} is an adapter", f"park {spec.adapter_of}, which serves it"
            )
        if run.idleness.rest == "asleep":
            raise EndpointConflictError(f"endpoint {order.name} is asleep, and has no workers to park")
        run.rest("parked")
        return order.name

    async def _wake(self, order: WakeEndpoint) -> str:
        """A request for an adapter wakes the endpoint that serves it."""
        spec = self.kept.current.entry(order.name).spec
        run = self.endpoints.run_of(spec.adapter_of or order.name)
        if run is None or run.deleting:
            raise EndpointConflictError(f"endpoint {order.name} is being deleted")
        if not order.asked:
            await self.check_wake(run)
        run.wake(asked=order.asked)
        return order.name

    async def _delete(self, order: DeleteEndpoint) -> EndpointsAnswer:
        await self.kept.change(lambda registry: registries.delete(registry, order.name))
        run = self.endpoints.run_of(order.name)
        if run is not None:
            run.delete()
        self.happened(order.name, "to be deleted", "")
        return self._left(order.name)

    def _left(self, name: str) -> EndpointsAnswer:
        view = self.endpoints.view(name)
        return EndpointsAnswer(() if view is None else (view,))

    async def _check(self, spec: EndpointSpec) -> None:
        others = [entry.spec for name, entry in self.kept.current.entries.items() if name != spec.name]
        check_names(spec, others, self.own_names)
        await self.check_machine(spec, others)


def _check_no_ways(spec: EndpointSpec, *, replace: bool = False, roll: bool = False) -> None:
    """Raise UsageError for ways of carrying out an order that mean nothing for it."""
    given = REPLACE if replace else ROLL if roll else None
    if given is not None:
        raise UsageError(f"endpoint {spec.name} is no adapter, and {given} is given", "leave it out")


def _check_bounds(name: str, what: str, wanted: int | None, least: int, most: int) -> None:
    if wanted is not None and not least <= wanted <= most:
        bound = f"{'max' if wanted > most else 'min'}-{what.replace(' ', '-')}"
        raise UsageError(
            f"endpoint {name} has {least} to {most} {what}, and {wanted} are asked for",
            f"change its bounds: dynamo endpoint update {name} --{bound} {wanted}",
        )
