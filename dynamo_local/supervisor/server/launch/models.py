"""Has the models of a graph checked and fetched before its processes start, and gives these the folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.endpoints.adapters import with_room
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.model.adapter import check_adapter, read_base
from dynamo_local.model.named.names import QUICKSTART, RANDOM
from dynamo_local.model.obtain import Obtained, Wish, wish_of
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.graph import Graph
from dynamo_local.sdk.service import spec_of
from state.devices.allocation import Inventory

Obtain = Callable[[Wish], Obtained]

_MODEL = "model"
_SERVED_NAME = "served-model-name"
_ENGINE = "engine"
_MOCKER = "mocker"
_OF_VLLM = "load-format"
"""A key of every service that takes vLLM's settings."""


def with_models(graph: Graph, resolved: ResolvedGraph, obtain: Obtain, on_cpu: bool) -> ResolvedGraph:
    """The graph with each model that its workers load in place: checked, fetched once, and named by its folder.

    Services still serve it under the name that was given, unless they have another. The models of mockers are left as
    they are, since nothing loads them. Raises what `obtain` raises.
    """
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in map(spec_of, graph.services)}
    obtained: dict[str, Obtained] = {}
    for service in resolved.services:
        if _loads(service, keys[service.name]) and service.config[_MODEL] not in obtained:
            obtained[service.config[_MODEL]] = obtain(wish_of(service.config, on_cpu))

    def replaced(service: ResolvedService) -> ResolvedService:
        found = obtained.get(service.config.get(_MODEL, ""))
        if found is None or _OF_VLLM not in keys[service.name]:
            return service
        return msgspec.structs.replace(service, config=_config(service.config, found, keys[service.name]))

    return msgspec.structs.replace(resolved, services=tuple(map(replaced, resolved.services)))


def without_downloads_for_mockers(graph: Graph, resolved: ResolvedGraph) -> ResolvedGraph:
    """The graph with the model `random` for `quickstart`, under the same served name, if all its workers are mockers.

    Mockers compute nothing, so that the real model would be fetched for its tokenizer alone.
    """
    engines = [service for service in resolved.services if service.role in ENGINE_ROLES]
    if not engines or any(service.config.get(_ENGINE) != _MOCKER for service in engines):
        return resolved
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in map(spec_of, graph.services)}

    def replaced(service: ResolvedService) -> ResolvedService:
        if service.config.get(_MODEL) != QUICKSTART:
            return service
        config = {**service.config, _MODEL: RANDOM}
        if _SERVED_NAME in keys[service.name]:
            config.setdefault(_SERVED_NAME, [QUICKSTART])
        return msgspec.structs.replace(service, config=config)

    return msgspec.structs.replace(resolved, services=tuple(map(replaced, resolved.services)))


def _loads(service: ResolvedService, keys: frozenset[str]) -> bool:
    """Whether the service is a worker that loads a model with vLLM."""
    is_worker = {_ENGINE, _OF_VLLM} <= keys
    return is_worker and service.config.get(_ENGINE) != _MOCKER and isinstance(service.config.get(_MODEL), str)


def _config(config: Mapping[str, Any], found: Obtained, keys: frozenset[str]) -> dict[str, Any]:
    """The configuration with the folder. A folder has no revisions, so that setting goes."""
    if found.model == config[_MODEL]:
        return dict(config)
    named = {**config, _MODEL: found.model}
    named.pop("revision", None)
    if _SERVED_NAME in keys:
        named.setdefault(_SERVED_NAME, [found.served_name])
    return named


# Room for LoRA adapters, as the files of these adapters ask for it.


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
