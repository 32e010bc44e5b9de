"""Specs from outside: commands, REST and files give mappings, which become an `EndpointSpec` or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.endpoints.awake.idling import SLEEP_AFTER_S
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.values import CHECKS, RefusedValueError, arg_name, encoded, is_arg, shown
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.suggestions import suggest

REPLACE = "replace"
"""Beside the fields of an order: whether the old revision may end before the new one is ready."""

ROLL = "roll"
"""Beside the fields of an adapter: whether arguments of its base that leave no room for it may be changed."""

FIELDS: tuple[str, ...] = tuple(name for name in EndpointSpec.__struct_fields__ if name != "adapter_room")
"""What an order can give."""

_RUN_FIELDS = ("model", "engine", "args", "gpu", "disaggregated", "adapter_room")
"""What the processes of an endpoint run. A change of these makes another revision, and no other change does."""

_FIXED_FIELDS = ("name", "adapter_of")
"""What an update cannot change."""

_ADAPTER_FIELDS = ("name", "model", "adapter_of", "labels")
"""What an adapter can have: all else is that of its base."""

_PREFILL_FIELDS = ("min_prefill_workers", "max_prefill_workers")

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    msgspec.structs.asdict(EndpointSpec(name="a", model="a")) | {"name": None, "model": None}
)


def read_spec(fields: object) -> EndpointSpec:
    """The spec of the fields as they came; one that is None gets its default.

    Raises ConfigError, whose cause names endpoint and field. Whether the model exists and the arguments fit is not
    checked.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"an endpoint is {shown(fields)}", "write its fields as a mapping: {name: ..., model: ...}")
    _check_names(fields, FIELDS)
    _check_given(fields)
    named = f"endpoint {_shown_name(fields['name'])}"
    given = {name: value for name, value in fields.items() if value is not None}
    checked = {name: _checked(named, name, value) for name, value in given.items()}
    spec = EndpointSpec(**checked)
    _check_together(named, spec, given)
    return spec


def changed_spec(spec: EndpointSpec, changes: Mapping[str, Any]) -> EndpointSpec:
    """The spec after an update. A field that is None gets its default; `args` and `labels` are merged by key, and lose
    the keys whose value is None. `replace` and `roll` (see `ways_of`) are passed over.

    Raises ConfigError as `read_spec`, and for fields that stay as long as the endpoint does.
    """
    _check_names(changes, (*FIELDS, REPLACE, ROLL))
    before = {name: getattr(spec, name) for name in FIELDS if getattr(spec, name) != _DEFAULTS[name]}
    if "disaggregated" in changes and not changes["disaggregated"]:
        before = {name: value for name, value in before.items() if name not in _PREFILL_FIELDS}
    for name in _FIXED_FIELDS:
        if name in changes and changes[name] != getattr(spec, name):
            raise ConfigError(
                f"endpoint {spec.name}: {name} cannot be changed", "create another endpoint, and delete this one"
            )
    given = fields_alone(changes)
    after = read_spec(before | {name: _merged(spec, name, value) for name, value in given.items()})
    return msgspec.structs.replace(after, adapter_room=spec.adapter_room)


@dataclass(frozen=True)
class Ways:
    """How an order may be carried out. `replace`: the old revision may end before the new one is ready. `roll`: for an
    adapter, arguments of its base may be changed."""

    replace: bool = False
    roll: bool = False


def ways_of(fields: Mapping[str, Any]) -> Ways:
    """The ways that are given beside the fields of an order. Raises ConfigError."""
    for name in (REPLACE, ROLL):
        if not isinstance(fields.get(name), bool | None):
            raise ConfigError(f"{name} is {shown(fields[name])}", "write true or false")
    return Ways(bool(fields.get(REPLACE)), bool(fields.get(ROLL)))


def fields_alone(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order, without the ways of carrying it out."""
    return {name: value for name, value in fields.items() if name not in (REPLACE, ROLL)}


def runs_differently(old: EndpointSpec, new: EndpointSpec) -> bool:
    """Whether processes of the old spec cannot serve the new one, so that the change takes another revision."""
    return any(encoded(getattr(old, name)) != encoded(getattr(new, name)) for name in _RUN_FIELDS)


def with_bounds_of(spec: EndpointSpec, other: EndpointSpec) -> EndpointSpec:
    """The spec with those fields of the other one that do not take another revision: bounds, policy, labels."""
    kept = {*_RUN_FIELDS, *_FIXED_FIELDS, *(() if spec.disaggregated and other.disaggregated else _PREFILL_FIELDS)}
    taken = {name: getattr(other, name) for name in FIELDS if name not in kept}
    return msgspec.structs.replace(spec, **taken)


def _check_names(fields: Mapping[Any, Any], allowed: Iterable[str]) -> None:
    known = tuple(allowed)
    for name in fields:
        if name not in known:
            said = f"an endpoint has no field {_shown_name(name)}"
            if isinstance(name, str) and not get_close_matches(name, known) and is_arg(name):
                listed = ", ".join(known)
                raise ConfigError(
                    said, f"a setting of vLLM's goes under args: {{{name}: ...}}; the fields are {listed}"
                )
            raise ConfigError(said, suggest(str(name), known, "it has"))


def _check_given(fields: Mapping[str, Any]) -> None:
    for name, example in (("name", "chat"), ("model", "Qwen/Qwen3-0.6B")):
        if fields.get(name) is None:
            whose = f" {_shown_name(fields['name'])}" if fields.get("name") is not None else ""
            raise ConfigError(f"endpoint{whose} has no {name}", f"write {name}: {example}")


def _merged(spec: EndpointSpec, name: str, value: Any) -> Any:
    if name not in ("args", "labels") or not isinstance(value, Mapping):
        return value
    normalised = {arg_name(key) if name == "args" else key: item for key, item in value.items()}
    if len(normalised) < len(value):
        raise ConfigError(f"endpoint {spec.name}: {name} has a key twice", "write each key once")
    merged = {**getattr(spec, name), **normalised}
    return {key: item for key, item in merged.items() if item is not None}


def _checked(named: str, name: str, value: Any) -> Any:
    try:
        return CHECKS[name](value)
    except RefusedValueError as refused:
        said = name if refused.key is None else f"{name}.{refused.key}"
        raise ConfigError(f"{named}: {said} {refused.cause}", refused.remedy) from refused


def _check_together(named: str, spec: EndpointSpec, given: Mapping[str, Any]) -> None:
    if spec.adapter_of is not None:
        _check_adapter(named, spec, given)
    for least, most in (("min_workers", "max_workers"), ("min_prefill_workers", "max_prefill_workers")):
        low, high = getattr(spec, least), getattr(spec, most)
        if high is not None and high < low:
            raise ConfigError(f"{named}: {most} is {high}, below {least}, which is {low}", f"raise {most}")
    _check_idle_times(named, spec)
    for name in _PREFILL_FIELDS:
        if given.get(name, _DEFAULTS[name]) != _DEFAULTS[name] and not spec.disaggregated:
            raise ConfigError(f"{named}: {name} is given without prefill workers", "add disaggregated: true")


def _check_idle_times(named: str, spec: EndpointSpec) -> None:
    """The times as they are given: a default gives way to one that is given (idling.times_of)."""
    park_s, sleep_s = spec.park_after_s, spec.sleep_after_s
    if sleep_s is not None and spec.min_workers > 0:
        raise ConfigError(
            f"{named}: sleep_after_s is given, and min_workers is {spec.min_workers}: its workers never end",
            "set min_workers to 0, or leave sleep_after_s out",
        )
    if park_s is not None and spec.min_workers == 0:
        sleep_s = SLEEP_AFTER_S if sleep_s is None else sleep_s
        if park_s >= sleep_s:
            default = ", its default" if spec.sleep_after_s is None else ""
            raise ConfigError(
                f"{named}: park_after_s is {park_s:g}, not below sleep_after_s, which is {sleep_s:g}{default}",
                "raise sleep_after_s, or lower park_after_s",
            )


def _check_adapter(named: str, spec: EndpointSpec, given: Mapping[str, Any]) -> None:
    if spec.adapter_of == spec.name:
        raise ConfigError(f"{named} is an adapter of itself", "name its base in adapter_of")
    for name, value in given.items():
        if name not in _ADAPTER_FIELDS and value != _DEFAULTS[name]:
            raise ConfigError(
                f"{named}: {name} is given for an adapter", f"leave it out: the workers of {spec.adapter_of} serve it"
            )


def _shown_name(name: object) -> str:
    """A name without quotes if it is one, else as any value."""
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 60 else shown(name)
