"""Resolves a graph: combines the defaults of its services with a YAML file and command-line options.

    Common: {model: tiny}                    # keys shared by the services that ask for them
    VllmWorker:
      common-configs: [model]                # asked for here
      max-num-seqs: 64                       # a key of the service's schema
      ServiceArgs: {workers: 2, resources: {gpu: 1}, envs: {OMP_NUM_THREADS: "1"}}

Each layer is checked by itself, so that an error names its source. A later layer wins:
decorator, what was chosen for the model, Common in the file, the service in the file, `--model` and `--Common.key=`,
flags without a service, `--Service.key=`.
In the file, a service's own key replaces the one from Common; an option merges deeply into what is there.
Some keys apply to all services, whichever service they were given to (`agree`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import check_namespace
from dynamo_local.core.suggestions import suggest
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService, shown
from dynamo_local.sdk.config.schema import SchemaTable, agreed_in, build_settings, settings_of
from dynamo_local.sdk.config.sections import (
    ARGS,
    COMMON,
    Flag,
    Override,
    Section,
    check_value,
    merge,
    overrides_of,
    parse_override,
    read_keys,
    read_section,
    read_yaml,
)
from dynamo_local.sdk.graph import Graph, target_of
from dynamo_local.sdk.resources import DeviceUse, Resources
from dynamo_local.sdk.service import Rewrite, ServiceSpec, spec_of

ENDPOINTS = "endpoints"
"""Key of the file whose value is no service's: the endpoints to serve (core/endpoints), which are not read here."""

_MODEL = "model"


@dataclass(frozen=True)
class _Layer:
    """The values of one source: Common (value and origin by key), and a section for each service of the graph. `notes`
    are those of the root's `rewrite`."""

    common: Mapping[str, tuple[Any, str]]
    sections: Mapping[str, Section]
    notes: tuple[str, ...] = ()

    def common_for(self, spec: ServiceSpec, takes: Iterable[str]) -> dict[str, Any]:
        """Return the keys of Common that the service takes, checked against its schema. Raises ConfigError."""
        taken = {name: self.common[name] for name in takes if name in self.common}
        return {name: check_value(spec, name, value, origin, COMMON) for name, (value, origin) in taken.items()}


def resolve(
    graph: Graph,
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    namespace: str | None = None,
    model: str | None = None,
    *,
    flags: Sequence[Flag] = (),
    chosen: Mapping[str, Section] = MappingProxyType({}),
) -> ResolvedGraph:
    """Resolve a graph. Raises ConfigError.

    `overrides`: options such as `--VllmWorker.max-num-seqs=64`. `flags`: options that name no service; an override of
    the same key wins. `model` is given to the services that take it from Common or, if none does, to all services with
    a key `model`. `chosen`: by service, values that hold where nobody gives another one.
    """
    specs = graph.specs
    rewrite = spec_of(graph.root).rewrite or _unchanged
    filed = _file_layer(specs, config_path, rewrite)
    typed = _option_layer(specs, [*overrides_of(specs, flags), *map(parse_override, overrides)], rewrite)
    takes = {spec.name: (*filed.sections[spec.name].takes, *typed.sections[spec.name].takes) for spec in specs}
    _check_common_is_taken(takes, filed, typed)
    if model is not None:
        takes = _give_model(specs, takes)
        typed = replace(typed, common={**typed.common, _MODEL: (model, "--model")})
    sections = agree(specs, {spec.name: _section(spec, takes, filed, typed) for spec in specs})
    sections = {name: chosen.get(name, Section()).under(section) for name, section in sections.items()}
    services = tuple(
        _resolved(
            cls,
            sections[spec_of(cls).name],
            graph.edges[spec_of(cls).name],
            _role(spec_of(cls), specs),
        )
        for cls in graph.services
    )
    named = spec_of(graph.root).namespace if namespace is None else namespace
    notes = tuple(dict.fromkeys((*filed.notes, *typed.notes)))
    return ResolvedGraph(graph.target, check_namespace(named), services, notes=notes)


def _unchanged(tree: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    return tree, ()


def _file_layer(specs: Sequence[ServiceSpec], path: Path | None, rewrite: Rewrite) -> _Layer:
    origin = str(path)
    tree = {} if path is None else read_yaml(path)
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin}: not a mapping of services", "write `Service:` with `key: value` lines under it")
    tree, notes = rewrite({name: value for name, value in tree.items() if name != ENDPOINTS})
    for name in tree:
        _check_section(str(name), specs, origin)
    return _Layer(
        common={name: (value, origin) for name, value in read_keys(tree.get(COMMON), COMMON, origin)},
        sections={spec.name: read_section(spec, tree.get(spec.name), origin) for spec in specs},
        notes=notes,
    )


def _option_layer(specs: Sequence[ServiceSpec], options: Sequence[Override], rewrite: Rewrite) -> _Layer:
    sections = {spec.name: Section() for spec in specs}
    by_name = {spec.name: spec for spec in specs}
    everything = SchemaTable({name: key for spec in specs for name, key in spec.schema.keys().items()})
    common: dict[str, tuple[Any, str]] = {}
    notes: list[str] = []
    for option in options:
        schema = by_name[option.section].schema if option.section in by_name else everything
        tree, more = rewrite({option.section: option.tree(schema)})
        notes.extend(more)
        for section, values in tree.items():
            _check_section(section, specs, option.origin)
            if section == COMMON:
                _put_common(common, values, option.origin)
            else:
                read = read_section(by_name[section], values, option.origin)
                sections[section] = sections[section].under(read)
    return _Layer(common, sections, tuple(notes))


def _put_common(common: dict[str, tuple[Any, str]], values: Any, origin: str) -> None:
    for name, value in read_keys(values, COMMON, origin):
        earlier = {name: common[name][0]} if name in common else {}
        common[name] = (merge(earlier, {name: value})[name], origin)


def _check_section(name: str, specs: Sequence[ServiceSpec], origin: str) -> None:
    names = [spec.name for spec in specs]
    if name not in (*names, COMMON):
        raise ConfigError(f"{origin}: the graph has no service {name}", suggest(name, names, "it has"))


def _check_common_is_taken(takes: Mapping[str, Iterable[str]], *layers: _Layer) -> None:
    taken = {name for names in takes.values() for name in names}
    for layer in layers:
        for name, (_, origin) in layer.common.items():
            if name not in taken:
                raise ConfigError(
                    f"{origin}: no service takes {COMMON}.{name}",
                    "list it in the common-configs of one, or remove it",
                )


def _give_model(specs: Sequence[ServiceSpec], takes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if any(_MODEL in names for names in takes.values()):
        return dict(takes)
    takers = {name for name, keys in ((spec.name, spec.schema.keys()) for spec in specs) if _MODEL in keys}
    if not takers:
        raise ConfigError("--model: no service of the graph has a model", "leave it out")
    return {name: (*names, _MODEL) if name in takers else names for name, names in takes.items()}


def _section(spec: ServiceSpec, takes: Mapping[str, Iterable[str]], filed: _Layer, typed: _Layer) -> Section:
    """Merge the layers of one service."""
    wanted = takes[spec.name]
    own = filed.sections[spec.name]
    base = replace(own, values={**filed.common_for(spec, wanted), **own.values})
    return base.under(Section(typed.common_for(spec, wanted))).under(typed.sections[spec.name])


def _role(spec: ServiceSpec, beside: Sequence[ServiceSpec]) -> str:
    there = {other.role for other in beside}
    return next((mine for role, mine in spec.role_beside.items() if role in there), spec.role)


def _resolved(cls: type, section: Section, depends_on: tuple[str, ...], role: str) -> ResolvedService:
    spec = spec_of(cls)
    _check_complete(spec, section)
    resources = Resources.parse(section.resources, spec.resources)
    use = spec.devices(section.values)
    return ResolvedService(
        name=spec.name,
        target=target_of(cls),
        role=role,
        workers=spec.workers if section.workers is None else section.workers,
        gpu=_devices(spec, section, resources, use),
        cpu=resources.cpu,
        envs=dict(section.envs),
        config=dict(section.values),
        depends_on=depends_on,
        preload=spec.preload(section.values),
        virtual=use.virtual,
    )


def _devices(spec: ServiceSpec, section: Section, resources: Resources, use: DeviceUse) -> float:
    """Return the number of devices of each worker, or its share of one. Raises ConfigError if the given number is not
    the one that the engine's settings need."""
    if use.ranks is None:
        return resources.gpu
    if "gpu" in section.resources and 0 < resources.gpu < 1 and use.ranks == 1:
        return resources.gpu
    if "gpu" in section.resources and resources.gpu != use.ranks:
        raise ConfigError(
            f"{spec.name}.{ARGS}.resources.gpu is {resources.gpu:g}, but by its settings a worker needs {use.ranks}",
            "leave resources.gpu out, or change tensor-parallel-size and the like",
        )
    return use.ranks


def _check_complete(spec: ServiceSpec, section: Section) -> None:
    missing = [name for name, key in spec.schema.keys().items() if key.required and name not in section.values]
    if missing:
        raise ConfigError(
            f"{spec.name} needs {', '.join(missing)}",
            f"set it in the file or with --{spec.name}.{missing[0]}=VALUE",
        )
    for kind in settings_of(spec.schema):
        build_settings(kind, spec.name, section.values)


# Keys on which the services of a graph must agree: a value given to one service, or in Common, applies to all.
# A value given twice must be the same. Services may give different parts of a mapping.


def agree(specs: Sequence[ServiceSpec], sections: Mapping[str, Section]) -> dict[str, Section]:
    """Return the sections by service, with the value of each agreed key in all services that have the key.

    Raises ConfigError with both values if two differ.
    """
    _check_same(specs, sections)
    given: dict[str, Any] = {}
    for spec in specs:
        given = merge(given, _agreed_values(spec, sections[spec.name]))
    return {spec.name: _with(spec, sections[spec.name], given) for spec in specs}


def _check_same(specs: Sequence[ServiceSpec], sections: Mapping[str, Section]) -> None:
    first: dict[str, tuple[str, Any]] = {}
    for spec in specs:
        for path, value in _leaves("", _agreed_values(spec, sections[spec.name])):
            where = f"{spec.name}.{path}"
            other, earlier = first.setdefault(agreed_in(spec.schema).get(path, path), (where, value))
            if earlier != value:
                both = f"{other} is {shown(path, earlier)} and {where} is {shown(path, value)}"
                raise ConfigError(f"{both}, but they must agree", "give it once: it applies to all")


def _agreed_values(spec: ServiceSpec, section: Section) -> dict[str, Any]:
    agreed = agreed_in(spec.schema)
    return {name: value for name, value in section.values.items() if name in agreed and value is not None}


def _with(spec: ServiceSpec, section: Section, given: Mapping[str, Any]) -> Section:
    agreed = agreed_in(spec.schema)
    return replace(section, values={**section.values, **{name: given[name] for name in given if name in agreed}})


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each with its dotted path."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, item in value.items():
        yield from _leaves(f"{path}.{name}" if path else name, item)
