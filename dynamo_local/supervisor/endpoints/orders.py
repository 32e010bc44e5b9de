"""Orders about endpoints: each is checked, and written into the registry, before it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.control.operations import (
    CREATE_ENDPOINT,
    DELETE_ENDPOINT,
    GET_ENDPOINT,
    LIST_ENDPOINTS,
    PARK_ENDPOINT,
    PUT_ENDPOINT,
    SCALE_ENDPOINT,
    UPDATE_ENDPOINT,
    WAKE_ENDPOINT,
    Call,
    Handler,
    Handlers,
    Operation,
    OtherSuccess,
    fields_of,
)
from dynamo_local.core.endpoints import registry as registries
from dynamo_local.core.endpoints.adapters import shortage, with_room
from dynamo_local.core.endpoints.checks import (
    REPLACE,
    ROLL,
    Ways,
    changed_spec,
    fields_alone,
    read_spec,
    runs_differently,
    ways_of,
)
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec, check_names
from dynamo_local.core.errors import EndpointAbsentError, EndpointConflictError, OrderError, StateError, UsageError
from dynamo_local.core.messages.endpoints import AdapterOrdered, EndpointView, shown
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import check_endpoint
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.board import BoardWriter
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.record import EndpointRecord

if TYPE_CHECKING:
    from dynamo_local.supervisor.endpoints.controller import EndpointController

_MOST_WORKERS = 2**31 - 1


class _Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: int | None = None
    prefill_workers: int | None = None


@dataclass(frozen=True)
class Orders:
    """Carries out orders, one at a time. One that cannot be is refused, and has changed nothing. `own_names`: names of
    models that the graph itself serves."""

    kept: KeptRegistry
    endpoints: EndpointController
    adapters: AdapterFolders
    board: BoardWriter
    record: EndpointRecord
    own_names: frozenset[str]
    wall_clock: Callable[[], float]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def handlers(self) -> Handlers:
        changes: dict[Operation, Handler] = {
            CREATE_ENDPOINT: self._create,
            UPDATE_ENDPOINT: self._update,
            PUT_ENDPOINT: self._update,
            SCALE_ENDPOINT: self._scale,
            PARK_ENDPOINT: self._park,
            WAKE_ENDPOINT: self._wake,
            DELETE_ENDPOINT: self._delete,
        }
        carried_out = {operation: partial(self._carry_out, operation, change) for operation, change in changes.items()}
        return {LIST_ENDPOINTS: self._list, GET_ENDPOINT: self._get, **carried_out}

    async def _list(self, _: Call) -> dict[str, Any]:
        return {"object": "list", "data": [shown(view) for view in self.endpoints.views()]}

    async def _get(self, call: Call) -> dict[str, Any]:
        return shown(self._view(call.name(check_endpoint)))

    def _view(self, name: str) -> EndpointView:
        found = self.endpoints.view(name)
        if found is None:
            self.kept.current.entry(name)  # raises, with names that are similar
            raise EndpointAbsentError(f"there is no endpoint {name}")
        return found

    async def _carry_out(self, operation: Operation, change: Handler, call: Call) -> Any:
        async with self._turn:
            content = await change(call)
            if call.by:
                name = (content.content if isinstance(content, OtherSuccess) else content)["name"]
                what = f"{operation.name.partition('_')[0]} ordered"
                self.record.log(Event("endpoint", what, f"by key {call.by}", endpoint=name, key=call.by))
            if operation not in (PARK_ENDPOINT, WAKE_ENDPOINT):
                # Workers look at the board for each request of an adapter: what is answered holds for them.
                with suppress(StateError):
                    await self.board.publish()
            self.board.touch()
            return content

    @property
    def _bases(self) -> RolledBases:
        return RolledBases(self.kept, self.adapters, self.endpoints, self.record)

    async def _create(self, call: Call) -> dict[str, Any]:
        fields = fields_of(call.body)
        spec, ways = read_spec(fields_alone(fields)), ways_of(fields)
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
        self.record.happened(spec.name, f"created: model {spec.model}")
        return self._ordered(spec.name, None if base is None else self._bases.roll(base, registry, ways))

    async def _update(self, call: Call) -> dict[str, Any]:
        name, changes = call.name(check_endpoint), fields_of(call.body)
        before = self.kept.current.entry(name)
        spec, ways = changed_spec(before.spec, changes), ways_of(changes)
        await self._check(spec)
        run = self.endpoints.run_of(name)
        if run is not None:
            _check_no_ways(spec, roll=ways.roll)
            ranks = self.adapters.ranks(self.kept.current, spec.name)
            spec = with_room(spec, ranks, on_cpu=self.adapters.on_cpu)
        if run is not None and runs_differently(before.spec, spec) and run.answers and not ways.replace:
            await self.endpoints.check_update(run, spec)
        base = await self._bases.find(spec, ways)
        registry = await self._change(lambda registry: self._updated(registry, spec, run), base)
        entry = registry.entry(name)
        if run is not None:
            run.order(entry, replace=ways.replace)
        if entry.revision != before.revision:
            self.record.happened(name, f"update to revision {entry.revision} began")
        return self._ordered(name, None if base is None else self._bases.roll(base, registry, ways))

    def _ordered(self, name: str, adapter: AdapterOrdered | None) -> dict[str, Any]:
        return shown(msgspec.structs.replace(self._view(name), adapter=adapter))

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

    async def _scale(self, call: Call) -> dict[str, Any]:
        name, wanted = call.name(check_endpoint), _wanted(call)
        spec = self.kept.current.entry(name).spec
        run = self.endpoints.run_of(name)
        if run is None:
            raise UsageError(f"endpoint {name} is an adapter", f"scale {spec.adapter_of}, which serves it")
        if run.idleness.rest == "asleep" and wanted.workers != 0:
            raise EndpointConflictError(f"endpoint {name} is asleep", f"wake it first: dynamo endpoint wake {name}")
        _check_bounds(name, "workers", wanted.workers, spec.min_workers, spec.most_workers)
        least = spec.min_prefill_workers if spec.disaggregated else 0
        _check_bounds(name, "prefill workers", wanted.prefill_workers, least, spec.most_prefill_workers)
        run.scale(wanted.workers, wanted.prefill_workers)
        return shown(self._view(name))

    async def _park(self, call: Call) -> dict[str, Any]:
        name, _ = call.name(check_endpoint), call.fields(())
        spec = self.kept.current.entry(name).spec
        run = self.endpoints.run_of(name)
        if run is None:
            raise EndpointConflictError(f"endpoint {name} is an adapter", f"park {spec.adapter_of}, which serves it")
        if run.idleness.rest == "asleep":
            raise EndpointConflictError(f"endpoint {name} is asleep, and has no workers to park")
        run.rest("parked")
        return shown(self._view(name))

    async def _wake(self, call: Call) -> dict[str, Any]:
        """A request for an adapter wakes the endpoint that serves it."""
        name, asked, _ = call.name(check_endpoint), call.flag("asked"), call.fields(())
        spec = self.kept.current.entry(name).spec
        run = self.endpoints.run_of(spec.adapter_of or name)
        if run is None or run.deleting:
            raise EndpointConflictError(f"endpoint {name} is being deleted")
        if not asked:
            await self.endpoints.check_wake(run)
        run.wake(asked=asked)
        return shown(self._view(name))

    async def _delete(self, call: Call) -> dict[str, Any] | OtherSuccess:
        name = call.name(check_endpoint)
        await self.kept.change(lambda registry: registries.delete(registry, name))
        run = self.endpoints.run_of(name)
        if run is not None:
            run.delete()
        self.record.happened(name, "to be deleted")
        left = self.endpoints.view(name)
        return OtherSuccess({"object": "endpoint", "name": name, "deleted": True}, 200) if left is None else shown(left)

    async def _check(self, spec: EndpointSpec) -> None:
        others = [entry.spec for name, entry in self.kept.current.entries.items() if name != spec.name]
        check_names(spec, others, self.own_names)
        await self.endpoints.check_machine(spec, others)


def _wanted(call: Call) -> _Wanted:
    try:
        wanted = msgspec.convert(fields_of(call.body), _Wanted)
    except msgspec.ValidationError as error:
        raise OrderError(str(error)) from None
    numbers = msgspec.structs.asdict(wanted)
    if all(number is None for number in numbers.values()):
        raise OrderError("workers or prefill_workers is needed", param="workers")
    for name, number in numbers.items():
        if number is not None and not 0 <= number <= _MOST_WORKERS:
            raise OrderError(f"{name} must be a number from 0 on, got {number}", param=name)
    return wanted


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


# Orders of LoRA adapters: their bases are rolled to revisions with room, where they have none.


@dataclass(frozen=True)
class Base:
    """The base of the adapter `of` that is ordered, and its spec with room for it. `lacks`: why what is ordered of it
    has none, and `still_lacks`: why the revision that answers has none, as clauses."""

    run: EndpointRun
    of: str
    spec: EndpointSpec
    lacks: str
    still_lacks: str


@dataclass(frozen=True)
class RolledBases:
    """The bases of the adapters of one server."""

    kept: KeptRegistry
    adapters: AdapterFolders
    endpoints: EndpointController
    record: EndpointRecord

    async def find(self, spec: EndpointSpec, ways: Ways) -> Base | None:
        """The base of an adapter that is ordered; None for an endpoint of another kind, and without a base. Raises
        UsageError if the adapter cannot be served, or the base cannot be rolled."""
        registry = self.kept.current
        entry = None if spec.adapter_of is None else registry.entries.get(spec.adapter_of)
        run = None if entry is None else self.endpoints.run_of(entry.spec.name)
        if entry is None or run is None:
            return None
        await self.adapters.read(spec, entry.spec)
        ranks = self.adapters.ranks(registry, entry.spec.name, spec)
        roomy = with_room(entry.spec, ranks, on_cpu=self.adapters.on_cpu, of=spec.name, roll=ways.roll)
        if roomy != entry.spec and run.answers and not ways.replace:
            await self.endpoints.check_update(run, roomy)
        lacks, still_lacks = (
            shortage(each, ranks, on_cpu=self.adapters.on_cpu) for each in (entry.spec, run.spec_that_takes)
        )
        return Base(run, spec.name, roomy, lacks, still_lacks)

    def roll(self, base: Base, registry: Registry, ways: Ways) -> AdapterOrdered:
        """Have the base rolled if it lacks room. `registry`: with its spec. Returns what is to be said of that."""
        name = base.spec.name
        if base.lacks:
            entry = registry.entry(name)
            base.run.order(entry, replace=ways.replace)
            self.record.happened(name, f"update to revision {entry.revision} began", f"room for adapter {base.of}")
            return AdapterOrdered("rolled", f"{name} is rolled: {base.lacks}")
        if base.still_lacks:
            return AdapterOrdered("rolled", f"{name} is rolled already: {base.still_lacks}")
        return AdapterOrdered("loaded", f"{base.of} is loaded: the workers of {name} have room for it")
