"""The endpoints that `dynamo serve` is given: in a file, and by the registry."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.cli.serving.choosing import PLANNER_ROLE, Decided, slots_given
from dynamo_local.cli.serving.target import parse_target
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.devices import devices_together
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import DEFAULT_NAMESPACE
from dynamo_local.core.sizing.devices import slots_for_endpoints
from dynamo_local.core.sizing.machine import Choice
from dynamo_local.sdk.config.configuration import ENDPOINTS
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.config.sections import Section
from dynamo_local.sdk.config.yaml_source import read_yaml
from dynamo_local.sdk.graph import Graph
from dynamo_local.supervisor.server.launch.prepare import Chosen, registry_of
from state.devices.allocation import Inventory
from state.endpoints.registry import read_registry
from state.paths import StatePaths

_EXAMPLE = "write `endpoints:` with `- {name: ..., model: ...}` lines under it"
_MISSPELT = ("endpoint", "endpoints", "models")


def endpoints_in(config: Path | None) -> tuple[EndpointSpec, ...] | None:
    """The endpoints of a configuration file; None if it does not say. Raises ConfigError, which names file and
    endpoint. Relative paths of models are those in the folder of the file."""
    if config is None:
        return None
    tree = read_yaml(config)
    if not isinstance(tree, Mapping) or ENDPOINTS not in tree:
        _check_spelling(config, tree)
        return None
    listed = tree[ENDPOINTS]
    if listed is None:
        raise ConfigError(f"{config}: nothing is listed under {ENDPOINTS}", f"{_EXAMPLE}, or `{ENDPOINTS}: []`")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ConfigError(f"{config}: {ENDPOINTS} is not a list", _EXAMPLE)
    specs = [_read(fields, config.parent, f"{config}: {ENDPOINTS}[{index}]") for index, fields in enumerate(listed)]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{config}: endpoint {name} is given twice", "rename one of them")
    return tuple(specs)


def _check_spelling(config: Path, tree: object) -> None:
    """Raise ConfigError for a file without the key `endpoints` that was meant to have it."""
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        raise ConfigError(f"{config} is a list", f"write `{ENDPOINTS}:` in a line above it")
    for key in tree if isinstance(tree, Mapping) else ():
        if str(key).lower() in _MISSPELT:
            raise ConfigError(f"{config}: the key {key} means nothing", f"write `{ENDPOINTS}:`")


def with_local_model(fields: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """The fields of an endpoint with the path of its model made absolute: the registry is read in other folders, too.

    `folder`: where relative paths begin. Raises UsageError for what can be no model.
    """
    model = fields.get("model")
    if not isinstance(model, str) or not model.strip():
        return dict(fields)
    path = folder / Path(model).expanduser()
    if path.is_dir():
        return {**fields, "model": str(path.absolute().resolve())}
    if model.startswith("."):
        raise UsageError(
            f"model {model} is no folder in {folder.absolute()}", "write its path from there, or all of it"
        )
    if parse_target(model).is_graph:
        raise UsageError(f"{model!r} is a graph, and an endpoint has a model", "name a folder or a Hugging Face id")
    is_path = model.startswith(("/", "~"))
    return {**fields, "model": str(path.absolute().resolve()) if is_path else model}


def has_ordered(namespace: str | None) -> bool:
    """Whether endpoints were ordered in the namespace earlier. Raises ConfigError, StateError."""
    return bool(read_registry(StatePaths.of(namespace or DEFAULT_NAMESPACE, os.environ)).entries)


def specs_of(namespace: str | None, endpoints: Sequence[EndpointSpec], *, forget: bool) -> tuple[EndpointSpec, ...]:
    """All endpoints that the server would serve: these, and those that were ordered earlier. Raises StateError,
    UsageError."""
    paths = StatePaths.of(namespace or DEFAULT_NAMESPACE, os.environ)
    entries = registry_of(paths, tuple(endpoints), forget=forget).entries
    return tuple(entry.spec for entry in entries.values())


_ANY = 1_000_000
"""A budget that no cluster reaches: the devices that its nodes have are the bound."""


@dataclass
class EndpointsChooser:
    """A `launch.Chooser` for a server without a model of its own: its planner acts, on all devices, also on those of
    the nodes that join, where workers live on the nodes of a cluster (`clustered`).

    `specs`: its endpoints, for which CPU slots are made unless the user has said how many (`cpu_slots`, environment).
    """

    specs: Sequence[EndpointSpec]
    cpu_slots: int | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    decided: list[Decided] = field(default_factory=list)
    clustered: bool = False

    def __call__(self, graph: Graph, resolved: ResolvedGraph, inventory: Inventory) -> Chosen:
        """Choose CPU slots, and settings of the planner: endpoints have settings of their own."""
        slots = self._slots(inventory)
        self.decided = [] if slots is None else [Decided(slots.key, slots.value, (), slots.reason)]
        number = len(inventory.devices) if slots is None else int(slots.value)
        settings = {"no-operation": False, "max-gpu-budget": _ANY if self.clustered else max(1, number)}
        sections = {spec.name: Section(settings) for spec in graph.specs if spec.role == PLANNER_ROLE}
        return Chosen(sections, None if slots is None else number)

    def _slots(self, inventory: Inventory) -> Choice | None:
        if inventory.kind == "gpu" or self.clustered or slots_given(self.cpu_slots, self.environ) is not None:
            return None
        return slots_for_endpoints(*devices_together(self.specs), len(inventory.devices))


def _read(fields: Any, folder: Path, origin: str) -> EndpointSpec:
    try:
        return read_spec(with_local_model(fields, folder) if isinstance(fields, Mapping) else fields)
    except UsageError as error:
        raise ConfigError(f"{origin}: {error.cause}", error.remedy) from error
