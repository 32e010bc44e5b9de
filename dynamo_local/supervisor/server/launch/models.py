"""The models of what is launched: found, checked and fetched before any process starts, and given to services as
folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.endpoints.adapters import with_room
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.engine.vllm.command_line import OF_VLLM
from dynamo_local.model.adapter import check_adapter, read_base
from dynamo_local.model.facts import read_config_facts, read_facts
from dynamo_local.model.named.names import NAMES, QUICKSTART, RANDOM, NamedModel, named_model
from dynamo_local.model.obtain import Obtained, Wish, obtain, wish_of
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.graph import Graph
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import Inventory

MODEL, SERVED_NAME, MOCKER = "model", "served-model-name", "mocker"
_DTYPE = "dtype"
_ENGINE = "engine"


class _KnownError(DynamoError):
    """Ends `obtain` where its facts are wanted and not its weights."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__("the facts are known")
        self.facts = facts


class ModelSource:
    """Finds models, each once. `fetches_weights`: False only to look what a model is."""

    def __init__(self, report: Report, *, fetches_weights: bool = True) -> None:
        self._report = report
        self._fetches_weights = fetches_weights
        self._named: dict[str, NamedModel] = {}
        self._found: dict[str, tuple[Obtained, ModelFacts | None]] = {}

    def facts(
        self, config: Mapping[str, Any], *, computing: bool, on_cpu: bool, fit: Callable[[ModelFacts], None]
    ) -> ModelFacts | None:
        """The facts of the model of a service with that configuration; None if vLLM is to find it.

        `fit` is called with them before weights are fetched, and may raise. `computing`: engines load the model.
        Raises DynamoError for what cannot be had or loaded.
        """
        model = str(config["model"])
        if model in NAMES:
            facts = read_facts(self.named(model).folder)
            fit(facts)
            return facts
        if not computing:
            return _tokenizer_facts(Path(model).expanduser())
        return self._find(wish_of(config, on_cpu), fit)[1]

    def named(self, name: str) -> NamedModel:
        """The model of one of `NAMES`. Raises UsageError if it cannot be had."""
        if name not in self._named:
            self._named[name] = named_model(name, self._report.step)
        return self._named[name]

    def obtain(self, wish: Wish) -> Obtained:
        """A model that is ready to be loaded, or one whose weights are not fetched as it is. Raises DynamoError."""
        return self._find(wish, lambda _: None)[0]

    def _find(self, wish: Wish, fit: Callable[[ModelFacts], None]) -> tuple[Obtained, ModelFacts | None]:
        def before_weights(facts: ModelFacts) -> None:
            fit(facts)
            if not self._fetches_weights and not Path(wish.model).expanduser().is_dir():
                raise _KnownError(facts)

        if wish.model not in self._found:
            try:
                found = obtain(wish, self._report, before_weights)
                self._found[wish.model] = found, None if found.folder is None else found.facts
            except _KnownError as known:
                self._found[wish.model] = Obtained(wish.model, wish.model), known.facts
        return self._found[wish.model]


def _tokenizer_facts(folder: Path) -> ModelFacts | None:
    """Facts for a frontend before mockers, which load no model. Whatever is wrong, the frontend will say."""
    try:
        return read_config_facts(folder) if folder.is_dir() else None
    except (DynamoError, OSError):
        return None


def with_models(graph: Graph, resolved: ResolvedGraph, models: ModelSource, *, on_cpu: bool) -> ResolvedGraph:
    """The graph with each model in place, by its folder: those that are given by name, and those that its workers load,
    which are checked and fetched.

    Services still serve it under the name that was given, unless they have another, and load a named model in the dtype
    that it needs, unless the configuration says otherwise. The other models of mockers are left as they are, since
    nothing loads them. Raises DynamoError for what cannot be had or loaded.
    """
    resolved = _reconfigured(graph, resolved, lambda config, keys: _with_named(config, keys, models))
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in graph.specs}
    obtained: dict[str, Obtained] = {}
    for service in resolved.services:
        if _loads(service.config, keys[service.name]) and service.config[MODEL] not in obtained:
            obtained[service.config[MODEL]] = models.obtain(wish_of(service.config, on_cpu))
    return _reconfigured(graph, resolved, lambda config, keys: _with_obtained(config, keys, obtained))


def without_downloads_for_mockers(graph: Graph, resolved: ResolvedGraph) -> ResolvedGraph:
    """The graph with the model `random` for `quickstart`, under the same served name, if all its workers are mockers.

    Mockers compute nothing, so that the real model would be fetched for its tokenizer alone.
    """
    engines = [service for service in resolved.services if service.role in ENGINE_ROLES]
    if not engines or any(service.config.get(_ENGINE) != MOCKER for service in engines):
        return resolved

    def replaced(config: Mapping[str, Any], keys: frozenset[str]) -> Mapping[str, Any]:
        if config.get(MODEL) != QUICKSTART:
            return config
        return _where_not_given({**config, MODEL: RANDOM}, keys, {SERVED_NAME: [QUICKSTART]})

    return _reconfigured(graph, resolved, replaced)


def _reconfigured(
    graph: Graph, resolved: ResolvedGraph, change: Callable[[Mapping[str, Any], frozenset[str]], Mapping[str, Any]]
) -> ResolvedGraph:
    """The graph with each configuration changed; `change` is told the keys of its service as well."""
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in graph.specs}
    services = (
        msgspec.structs.replace(service, config=dict(change(service.config, keys[service.name])))
        for service in resolved.services
    )
    return msgspec.structs.replace(resolved, services=tuple(services))


def _with_named(config: Mapping[str, Any], keys: frozenset[str], models: ModelSource) -> Mapping[str, Any]:
    if config.get(MODEL) not in NAMES:
        return config
    found = models.named(config[MODEL])
    dtype = {} if found.dtype is None else {_DTYPE: found.dtype}
    return _where_not_given({**config, MODEL: str(found.folder)}, keys, {SERVED_NAME: [found.served_name], **dtype})


def _with_obtained(
    config: Mapping[str, Any], keys: frozenset[str], obtained: Mapping[str, Obtained]
) -> Mapping[str, Any]:
    """The configuration with the folder. A folder has no revisions, so that setting goes."""
    found = obtained.get(config.get(MODEL, ""))
    if found is None or OF_VLLM not in keys or found.model == config[MODEL]:
        return config
    kept = {key: value for key, value in config.items() if key != "revision"}
    return _where_not_given({**kept, MODEL: found.model}, keys, {SERVED_NAME: [found.served_name]})


def _where_not_given(config: Mapping[str, Any], keys: frozenset[str], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with those of the settings that the service has, where it does not give them."""
    return {**config, **{key: value for key, value in settings.items() if key in keys and key not in config}}


def _loads(config: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Whether the service is a worker that loads a model with vLLM."""
    is_worker = {_ENGINE, OF_VLLM} <= keys
    return is_worker and config.get(_ENGINE) != MOCKER and isinstance(config.get(MODEL), str)


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
