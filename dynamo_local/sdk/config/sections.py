"""Reads and checks one service's section of a configuration.

A command-line option is a section with one key, and is checked like a section of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.suggestions import suggest
from dynamo_local.sdk.config.redaction import shown
from dynamo_local.sdk.config.schema import (
    KeySpec,
    SchemaTable,
    canonical,
    check_variables,
    coerce,
    fixed_by,
    refused_in,
)
from dynamo_local.sdk.resources import Resources
from dynamo_local.sdk.service import ServiceSpec

COMMON = "Common"
TAKES = "common-configs"
ARGS = "ServiceArgs"

TAKEN = KeySpec(TAKES, "list", help="Keys of Common that the service takes.")
"""The key with which a service lists the keys that it takes from Common."""

SERVICE_ARGS = SchemaTable.of(
    KeySpec("workers", "int", help="Number of workers of the service, at least 1. By default as the service declares."),
    KeySpec("resources", "dict", help="Resources of each worker."),
    KeySpec("envs", "dict", help="Environment variables of the service's processes. Values are text."),
)
"""Keys of ServiceArgs, a section that every service has."""

_ARGS_KEYS = tuple(SERVICE_ARGS.keys())


@dataclass(frozen=True)
class Section:
    """The values of one source for one service. None or empty: not given."""

    values: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    workers: int | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)

    def under(self, other: Section) -> Section:
        """Return this section merged with `other`, whose values win. Mappings are merged deeply."""
        return Section(
            values=merge(self.values, other.values),
            takes=tuple(dict.fromkeys((*self.takes, *other.takes))),
            workers=self.workers if other.workers is None else other.workers,
            resources={**self.resources, **other.resources},
            envs={**self.envs, **other.envs},
        )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings; values of `over` win, and values that are mappings on both sides are merged likewise."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_section(spec: ServiceSpec, raw: Any, origin: str) -> Section:
    """Read and check a section. `origin` names its source in errors. Raises ConfigError."""
    given = _mapping(raw, spec.name, origin)
    args = _mapping(given.pop(ARGS, None), f"{spec.name}.{ARGS}", origin)
    takes = given.pop(TAKES, None)
    for name in args:
        if name not in _ARGS_KEYS:
            raise ConfigError(f"{origin}: {spec.name}.{ARGS} has no key {name}", suggest(str(name), _ARGS_KEYS))
    return Section(
        values={name: check_value(spec, name, value, origin) for name, value in read_keys(given, spec.name, origin)},
        takes=_takes(spec, takes, origin),
        workers=_workers(spec, args.get("workers"), origin),
        resources=_resources(spec, args.get("resources"), origin),
        envs=_envs(spec, args.get("envs"), origin),
    )


def read_keys(raw: Any, section: str, origin: str) -> list[tuple[str, Any]]:
    """Return the keys in canonical spelling, with unchecked values.

    Raises ConfigError for a key given twice.
    """
    pairs = [(canonical(str(name)), value) for name, value in _mapping(raw, section, origin).items()]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{origin}: {section}.{name} is given twice, once with underscores", "remove one")
    return pairs


def check_value(spec: ServiceSpec, name: str, value: Any, origin: str, source: str = "") -> Any:
    """Return the value, converted as the service's schema demands. `source` names the section of its origin, if it is
    another one. Raises ConfigError."""
    keys = spec.schema.keys()
    if name not in keys:
        raise _no_key(spec, name, f"{origin}: {spec.name} has no key {name}", (*keys, ARGS))
    try:
        return coerce(keys[name], value)
    except ValueError as error:
        via = f" (from {source})" if source else ""
        raise ConfigError(f"{origin}: {spec.name}.{name}{via} is {shown(name, value)}", str(error)) from error


def _no_key(spec: ServiceSpec, name: str, cause: str, keys: Iterable[str]) -> ConfigError:
    fixed = fixed_by(spec.schema)
    if name in fixed:
        return ConfigError(f"{cause}: dynamo-local sets it", fixed[name])
    return ConfigError(cause, suggest(name, keys))


def _mapping(raw: Any, section: str, origin: str) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{origin}: {section} is not a mapping", "write `key: value` lines under it")
    return dict(raw)


def _takes(spec: ServiceSpec, raw: Any, origin: str) -> tuple[str, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise ConfigError(f"{origin}: {spec.name}.{TAKES} is not a list of keys", "write it as [key, key]")
    names = tuple(canonical(name) for name in raw)
    keys = spec.schema.keys()
    for name in names:
        if name not in keys:
            raise _no_key(spec, name, f"{origin}: {spec.name}.{TAKES} lists {name}, {spec.name} has no such key", keys)
    return names


def _workers(spec: ServiceSpec, raw: Any, origin: str) -> int | None:
    if raw is None:
        return None
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 1:
        raise ConfigError(f"{origin}: {spec.name}.{ARGS}.workers is {raw!r}", "expected int of at least 1")
    return raw


def _resources(spec: ServiceSpec, raw: Any, origin: str) -> Mapping[str, Any]:
    try:
        Resources.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{origin}: {spec.name}.{ARGS}: {error}") from error
    return raw or {}


def _envs(spec: ServiceSpec, raw: Any, origin: str) -> dict[str, str]:
    envs: dict[Any, Any] = _mapping(raw, f"{spec.name}.{ARGS}.envs", origin)
    for name, value in envs.items():
        where = f"{origin}: {spec.name}.{ARGS}.envs.{name}"
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"{where} is not a variable's name")
        # YAML does not keep the text of numbers such as 1.10, nor the spelling of true.
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            raise ConfigError(f"{where} is not text", "put its value in quotes")
    texts = {name: str(value) for name, value in envs.items()}
    check_variables(texts, refused_in(spec.schema), f"{origin}: {spec.name}.{ARGS}.envs.")
    return texts
