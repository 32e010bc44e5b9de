"""Keys on which the services of a graph must agree: a value given to one service, or in Common, applies to all.

A value given twice must be the same. Services may give different parts of a mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk.config.redaction import shown
from dynamo_local.sdk.config.schema import agreed_in
from dynamo_local.sdk.config.sections import Section, merge
from dynamo_local.sdk.service import ServiceSpec


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
