"""Orders of LoRA adapters: their bases are rolled to revisions with room, where they have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_local.core.endpoints.adapters import shortage
from dynamo_local.core.endpoints.checks import Ways
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import AdapterOrdered
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry


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
    """The bases of the adapters of one server. The callables are those of `orders.Orders`."""

    kept: KeptRegistry
    adapters: AdapterFolders
    run_of: Callable[[str], EndpointRun | None]
    check_update: Callable[[EndpointRun, EndpointSpec], Awaitable[None]]
    happened: Callable[[str, str, str], None]

    async def find(self, spec: EndpointSpec, ways: Ways) -> Base | None:
        """The base of an adapter that is ordered; None for an endpoint of another kind, and without a base. Raises
        UsageError if the adapter cannot be served, or the base cannot be rolled."""
        registry = self.kept.current
        entry = None if spec.adapter_of is None else registry.entries.get(spec.adapter_of)
        run = None if entry is None else self.run_of(entry.spec.name)
        if entry is None or run is None:
            return None
        await self.adapters.read(spec, entry.spec)
        ranks = self.adapters.ranks(registry, entry.spec.name, spec)
        roomy = self.adapters.with_room(entry.spec, ranks, spec.name, roll=ways.roll)
        if roomy != entry.spec and run.answers and not ways.replace:
            await self.check_update(run, roomy)
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
            self.happened(name, f"update to revision {entry.revision} began", f"room for adapter {base.of}")
            return AdapterOrdered("rolled", f"{name} is rolled: {base.lacks}")
        if base.still_lacks:
            return AdapterOrdered("rolled", f"{name} is rolled already: {base.still_lacks}")
        return AdapterOrdered("loaded", f"{base.of} is loaded: the workers of {name} have room for it")
