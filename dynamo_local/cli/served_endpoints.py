"""Endpoints as `dynamo serve` is given them, in a file and by the registry, and what it does for the model of each: the
same options, choices and checks as for a model of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.cli.choosing import (
    PLANNER_ROLE,
    PREFILL_WORKERS,
    WORKERS,
    Decided,
    ModelChooser,
    ModelSource,
    Wishes,
    machine_of,
    parse_target,
    slots_given,
)
from dynamo_local.core.endpoints.adapters import settings_of
from dynamo_local.core.endpoints.checks import devices_together, read_spec
from dynamo_local.core.endpoints.spec import SERVED_NAME, EndpointSpec, served_names
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import DEFAULT_NAMESPACE
from dynamo_local.core.sizing.devices import slots_for_endpoints
from dynamo_local.core.sizing.machine import Choice, Machine
from dynamo_local.engine.vllm.arguments import OF_SERVER, every_argument
from dynamo_local.engine.vllm.command_line import flag_of
from dynamo_local.sdk.config.configuration import ENDPOINTS, resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.config.schema import canonical
from dynamo_local.sdk.config.sections import KV_NETWORK, KV_STREAM, Flag, Section, read_yaml
from dynamo_local.sdk.graph import Graph, load_graph
from dynamo_local.supervisor.endpoints.revisions.launch import AGGREGATED, DISAGGREGATED, ModelTools
from dynamo_local.supervisor.server.launch.prepare import Chosen, registry_of
from state.devices.allocation import Inventory
from state.endpoints.registry import read_registry
from state.paths import StatePaths

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.reports.report import Report

_EXAMPLE = "write `endpoints:` with `- {name: ..., model: ...}` lines under it"
_MISSPELT = ("endpoint", "endpoints", "models")

_ANY = 1_000_000
"""A budget that no cluster reaches: the devices that its nodes have are the bound."""
_TENSOR_PARALLEL = "tensor-parallel-size"
_SIZES = (_TENSOR_PARALLEL, "pipeline-parallel-size", "prefill-context-parallel-size")


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


@dataclass(frozen=True)
class EndpointToolMaker:
    """Makes the tools for the endpoints of one server (launch.MakeTools). `machine`: as it was before the first of
    their workers: what each gets of its memory goes by devices, and does not depend on which others run. `flags`: for
    the workers of all of them, unless an endpoint has its own."""

    machine: Machine
    flags: tuple[Flag, ...] = ()

    @classmethod
    def at_start(cls, inventory: Inventory, flags: tuple[Flag, ...] = ()) -> EndpointToolMaker:
        """With the memory that is free now."""
        return cls(machine_of(inventory, len(inventory.devices)), flags)

    def __call__(self, spec: EndpointSpec, inventory: Inventory, report: Report) -> ModelTools:
        """The tools for one endpoint's model. Raises UsageError for arguments that no service takes."""
        _check_no_server_settings(spec)
        source = ModelSource(report, fetches_weights=True)
        wishes = Wishes(
            spec.least_awake,
            spec.min_prefill_workers if spec.disaggregated else None,
            disagg=spec.disaggregated,
            planner=spec.most_workers > spec.least_awake,
        )
        chooser = ModelChooser(source.facts, wishes, sized=True, machine=self.machine)
        flags = (*(flag for flag in self.flags if not _goes_before(spec, flag)), *_flags(spec))
        return ModelTools(flags, tuple(_overrides(spec)), chooser, source.named, source.obtain)


def check_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments that no service takes, or with values that are none. Looks at no model."""
    _check_no_server_settings(spec)
    if spec.adapter_of is None:
        graph = load_graph(DISAGGREGATED if spec.disaggregated else AGGREGATED)
        resolve(graph, None, tuple(_overrides(spec)), None, spec.model, flags=tuple(_flags(spec)))


def _check_no_server_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments of the one HTTP server, which an endpoint of its own would not change."""
    sections = (value for name, value in spec.args.items() if _is_section(name, value))
    for name in map(canonical, chain(spec.args, *sections)):
        if name in OF_SERVER:
            what = f"args.{name} is about the HTTP server, which is the same for all models"
            raise UsageError(what, f"give it to the server: `dynamo serve ... --Frontend.{name}=VALUE`")


def _flags(spec: EndpointSpec) -> Iterator[Flag]:
    """The arguments that name no service."""
    yield flag_of(SERVED_NAME, _text(list(served_names(spec))), "name")
    for key, value in settings_of(spec).items():
        if key in every_argument() and key != SERVED_NAME:
            yield flag_of(key, _text(value), f"args.{key}")
        elif key != SERVED_NAME and not _is_section(key, value):
            yield Flag((key,), _text(value), f"args.{key}", beside=key)
    if spec.engine == "vllm" and _is_whole(spec.gpu) and not any(key in spec.args for key in _SIZES):
        yield flag_of(_TENSOR_PARALLEL, f"{spec.gpu:g}", "gpu")


def _overrides(spec: EndpointSpec) -> Iterator[str]:
    """The options of single services: those that the endpoint's fields stand for, then those of its arguments."""
    counts = {WORKERS: spec.least_awake} | ({PREFILL_WORKERS: spec.min_prefill_workers} if spec.disaggregated else {})
    for service, count in counts.items():
        yield f"--{service}.engine={spec.engine}"
        yield f"--{service}.ServiceArgs.workers={count}"
        if spec.gpu is not None and (spec.engine == "mocker" or not _is_whole(spec.gpu)):
            yield f"--{service}.ServiceArgs.resources.gpu={spec.gpu:g}"
    for key, value in spec.args.items():
        if _is_section(key, value):
            yield from (f"--{key}.{name}={_text(item)}" for name, item in value.items())


def _goes_before(spec: EndpointSpec, flag: Flag) -> bool:
    """Whether the endpoint has its own in the place of an option of the server. KV crosses machines in one way: one
    that chooses the other way does without the server's."""
    key, others = flag.path[0], {KV_NETWORK: KV_STREAM, KV_STREAM: KV_NETWORK}
    sections = (value for name, value in spec.args.items() if _is_section(name, value))
    return key in spec.args or any(own.get(others.get(key, "")) for own in (spec.args, *sections))


def _is_section(key: str, value: Any) -> bool:
    """Whether the argument holds settings of one service, by the service's name."""
    return key[0].isupper() and isinstance(value, Mapping)


def _is_whole(gpu: float | None) -> bool:
    return gpu is not None and gpu >= 1


def _text(value: Any) -> str:
    """A value as options spell it."""
    if isinstance(value, str):
        return f'"{value}"' if value in ("null", "~") else value
    return msgspec.json.encode(value).decode()
