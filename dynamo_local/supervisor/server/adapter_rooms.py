"""Room for LoRA adapters, as the files of these adapters ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamo_local.core.endpoints.adapters import with_room
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.model.adapter import check_adapter, read_base
from state.devices.allocation import Inventory


def rank_of(adapter: EndpointSpec, base: EndpointSpec, model_folder: str = "") -> int:
    """The rank of an adapter; 0 if it is not known. `model_folder`: of the base, empty if it is only known by its spec.
    Raises UsageError if the adapter is none, cannot be loaded, or does not fit the base's weights. Blocks.

    Mockers look at no files. A base of the hub may not be here yet: then it is not compared.
    """
    if base.engine != "vllm":
        return 0
    folder = Path(model_folder or base.model)
    return check_adapter(
        adapter.name, Path(adapter.model).expanduser(), read_base(folder) if folder.is_absolute() else None
    )


def on_cpu(inventory: Inventory) -> bool:
    """Whether workers have all of their adapters at the same time."""
    return inventory.kind == "cpu-slot"


def with_rooms(endpoints: Sequence[EndpointSpec], registry: Registry, inventory: Inventory) -> tuple[EndpointSpec, ...]:
    """Return the endpoints and the bases of their adapters, with room for all adapters. Nothing is rolled for that:
    their workers have not started. Raises UsageError for an adapter of these that cannot be served. Blocks.

    `registry`: everything that is ordered, these endpoints included. The folders of adapters that were ordered earlier
    may have gone.
    """
    specs = {spec.name: spec for spec in endpoints}
    for name in dict.fromkeys(spec.adapter_of or spec.name for spec in endpoints):
        base = registry.entry(name).spec
        adapters = [entry.spec for entry in registry.adapters_of(name)]
        ranks = {spec.name: _rank(spec, base, is_new=spec.name in specs) for spec in adapters}
        roomy = with_room(base, ranks, on_cpu=on_cpu(inventory))
        if roomy != base:
            specs[name] = roomy
    return tuple(specs.values())


def _rank(adapter: EndpointSpec, base: EndpointSpec, *, is_new: bool) -> int:
    try:
        return rank_of(adapter, base)
    except UsageError:
        if is_new:
            raise
        return 0
