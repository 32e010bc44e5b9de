"""The LoRA adapters of a server's endpoints: what is wrong with them, and which revisions have room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.endpoints.adapters import Ranks, served_on, shortage
from dynamo_local.core.endpoints.registry import Entry, Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.status import status_of_adapter
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.endpoints import EndpointStatus, ServedAdapter
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.record import EndpointRecord
from dynamo_local.supervisor.server.launch.models import rank_of

_EVERY_S = 5.0
"""Time between two looks at the folders."""


@dataclass(frozen=True)
class AdaptersOfBase:
    """The adapters of an endpoint with workers. `served`: by the revision that answers, or is to answer first, whose
    spec is `by`; `coming`: by the one that is ordered."""

    ranks: Ranks
    by: EndpointSpec
    served: frozenset[str]
    coming: frozenset[str]
    on_cpu: bool

    def lack_of(self, name: str) -> str:
        """Why the revision that answers cannot serve the adapter, as a clause; empty if it can."""
        if name in self.served:
            return ""
        ranks = {one: rank for one, rank in self.ranks.items() if one in self.served or one == name}
        return shortage(self.by, ranks, on_cpu=self.on_cpu)


@dataclass
class AdapterFolders:
    """What is known of adapters from their files, and from workers that have tried to load them: their ranks, and what
    is wrong with them. `runs`: what runs for each endpoint with workers."""

    kept: KeptRegistry
    runs: Mapping[str, EndpointRun]
    record: EndpointRecord
    on_cpu: bool
    _ranks: dict[str, int] = field(default_factory=dict, init=False)
    _wrong: dict[str, str] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Look at all adapters now and then, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        """Look at all adapters: their folders, and what workers tell of them."""
        adapters = _adapters(self.kept.current, self.runs)
        found = await asyncio.to_thread(_look, adapters)
        for (adapter, base, _), rank in zip(adapters, found, strict=True):
            entry = self.kept.current.entries.get(adapter.name)
            if entry is not None and entry.spec == adapter:
                why = self._told_by_workers(entry, base.name) if isinstance(rank, int) else ""
                self._note(adapter, why or rank)
        for name in self._wrong.keys() - self.kept.current.entries.keys():
            del self._wrong[name]

    async def read(self, adapter: EndpointSpec, base: EndpointSpec) -> None:
        """Look at the folder of an adapter that is ordered. Raises UsageError if it cannot be served on that base."""
        folder = _model_folder(self.runs.get(base.name))
        self._ranks[adapter.model] = await asyncio.to_thread(rank_of, adapter, base, folder)
        self._wrong.pop(adapter.name, None)

    def ranks(self, registry: Registry, base: str, ordered: EndpointSpec | None = None) -> dict[str, int]:
        """The adapters of an endpoint, with one that is ordered."""
        specs = {entry.spec.name: entry.spec for entry in registry.adapters_of(base)}
        if ordered is not None:
            specs[ordered.name] = ordered
        return {name: self._ranks.get(spec.model, 0) for name, spec in specs.items()}

    def of(self, run: EndpointRun) -> AdaptersOfBase:
        """The adapters of an endpoint, as its revisions can serve them."""
        ranks = self.ranks(self.kept.current, run.name)
        by, ordered = run.spec_that_takes, run.entry.spec
        return AdaptersOfBase(ranks, by, self._served(by, ranks), self._served(ordered, ranks), self.on_cpu)

    def listed(self, run: EndpointRun) -> Callable[[EndpointSpec], Sequence[ServedAdapter]]:
        """The adapters that a revision of the endpoint is to serve, by the revision's spec."""
        entries = self.kept.current.adapters_of(run.name)
        ranks = self.ranks(self.kept.current, run.name)

        def of_revision(spec: EndpointSpec) -> Sequence[ServedAdapter]:
            served = self._served(spec, ranks)
            return [_served_adapter(entry) for entry in entries if entry.spec.name in served]

        return of_revision

    def status(self, adapter: EndpointSpec, of: AdaptersOfBase | None, base: EndpointStatus | None) -> EndpointStatus:
        """The status of an adapter. `of` and `base`: of the endpoint that is to serve it; None if there is none."""
        lacks = "" if of is None else of.lack_of(adapter.name)
        comes = of is not None and adapter.name in of.coming
        wrong = self._wrong.get(adapter.name, "")
        return status_of_adapter(adapter.adapter_of or "", base, lacks=lacks, comes=comes, wrong=wrong)

    def _served(self, spec: EndpointSpec, ranks: Ranks) -> frozenset[str]:
        return frozenset(served_on(spec, ranks, on_cpu=self.on_cpu))

    def _told_by_workers(self, entry: Entry, base: str) -> str:
        """Why a worker cannot load the adapter; empty if none has said so."""
        run = self.runs.get(base)
        why = None if run is None else run.failed_adapters.get(_served_adapter(entry).key)
        return "" if why is None else f"a worker cannot load it: {why}"

    def _note(self, adapter: EndpointSpec, found: int | str) -> None:
        before = self._wrong.get(adapter.name)
        if isinstance(found, int):
            self._ranks[adapter.model] = found
            if self._wrong.pop(adapter.name, None) is not None:
                self.record.happened(adapter.name, "may be loaded again")
        elif found != before:
            self._wrong[adapter.name] = found
            self.record.happened(adapter.name, "failed", found)


def _adapters(registry: Registry, runs: Mapping[str, EndpointRun]) -> list[tuple[EndpointSpec, EndpointSpec, str]]:
    """All adapters, each with its base, and the folder of that one's model as far as it is known."""
    specs = [entry.spec for entry in registry.entries.values()]
    bases = [(spec, registry.entry(spec.adapter_of).spec) for spec in specs if spec.adapter_of is not None]
    return [(spec, base, _model_folder(runs.get(base.name))) for spec, base in bases]


def _model_folder(run: EndpointRun | None) -> str:
    return "" if run is None else run.model_folder


def _look(adapters: Sequence[tuple[EndpointSpec, EndpointSpec, str]]) -> list[int | str]:
    """The rank of each, or what is wrong with it. Blocks."""
    found: list[int | str] = []
    for adapter, base, folder in adapters:
        try:
            found.append(rank_of(adapter, base, folder))
        except UsageError as error:
            found.append(error.cause)
    return found


def _served_adapter(entry: Entry) -> ServedAdapter:
    # No other endpoint of any time has the same order.
    return ServedAdapter(entry.spec.name, str(Path(entry.spec.model).expanduser()), f"{entry.order}.{entry.revision}")
