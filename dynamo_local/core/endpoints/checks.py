"""Specs from outside: commands, REST and files give mappings, which become an `EndpointSpec` or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.endpoints.idling import SLEEP_AFTER_S
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.values import CHECKS, RefusedValueError, arg_name, encoded, is_arg, shown
from dynamo_local.core.errors import ConfigError, DeviceError
from dynamo_local.core.shares import fit_together, fits
from dynamo_local.core.suggestions import suggest

# The devices that endpoints need for the workers that each has at least, and at most. Pure.

_SLOTS = "CPU slots"
_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


def devices_of_worker(spec: EndpointSpec) -> float:
    """Devices of each worker, or the share of one, as far as the spec says; 1 where it is chosen for the model."""
    if spec.gpu is not None:
        return spec.gpu
    sizes = (spec.args.get(name) for name in _SIZES)
    return float(math.prod(size for size in sizes if isinstance(size, int) and size > 0))


def least_devices(spec: EndpointSpec) -> float:
    """Devices of the workers that the endpoint always has. An adapter needs none of its own, and an endpoint that may
    sleep none while it does."""
    if spec.adapter_of is not None or spec.min_workers == 0:
        return 0.0
    workers = spec.min_workers + (spec.min_prefill_workers if spec.disaggregated else 0)
    return workers * devices_of_worker(spec)


def least_awake_devices(spec: EndpointSpec) -> float:
    """Devices of the workers that the endpoint has at least while it is awake."""
    if spec.adapter_of is not None:
        return 0.0
    workers = spec.least_awake + (spec.min_prefill_workers if spec.disaggregated else 0)
    return workers * devices_of_worker(spec)


def devices_together(specs: Iterable[EndpointSpec]) -> tuple[int, int]:
    """Whole devices that the workers of these endpoints need together: for the least numbers of workers, and for the
    most. Workers with shares are on as few devices as have room for them; of the endpoints that may sleep, each can be
    awake, one at a time."""
    specs = tuple(specs)
    least = [amount for spec in specs for amount in _least_workers(spec)]
    more = [amount for spec in specs for amount in _more_workers(spec)]
    one_awake = max((least_awake_devices(spec) for spec in specs if spec.min_workers == 0), default=0.0)
    return _whole([*least, one_awake] if one_awake else least), _whole([*least, *more])


def check_devices(
    spec: EndpointSpec, others: Iterable[EndpointSpec], total: float, noun: str, *, on_nodes: bool = False
) -> None:
    """Raise DeviceError, with figures, if there are too few devices for the least workers of an endpoint beside those
    of the others. `total`: devices for all endpoints; `noun`: what they are called, in the plural. `on_nodes`: whether
    they are those of the nodes of a cluster."""
    others = tuple(others)
    needed, awake = least_devices(spec), least_awake_devices(spec)
    wanted = f"endpoint {spec.name} needs {_counted(awake, noun)} for the workers that it has at least"
    slots = ", or serve with more CPU slots, which may share cores (--cpu-slots)" if noun == _SLOTS else ""
    more = ", or add a node to the cluster" if on_nodes else slots
    if not fits(0, awake, total):
        raise DeviceError(
            f"{wanted}, and there are {total:g}", f"lower min_workers, or the devices of each worker{more}"
        )
    taken = {other.name: least_devices(other) for other in others}
    if needed and not fits(sum(taken.values()), needed, total):
        listed = ", ".join(f"{name} {count:g}" for name, count in taken.items() if count)
        raise DeviceError(
            f"{wanted}, and of {total:g} the others need {sum(taken.values()):g} ({listed})",
            f"lower min_workers of one of them, or delete one{more}",
        )
    if needed and not fit_together([each for one in (spec, *others) for each in _least_workers(one)], math.ceil(total)):
        raise DeviceError(
            f"the shares of {noun} that endpoint {spec.name} needs do not fit: each is of one device, and beside the "
            f"other endpoints too little of each of {total:g} is left",
            f"choose shares that add up to whole devices, such as 0.5 or 0.25{more}",
        )


def _least_workers(spec: EndpointSpec) -> list[float]:
    """What each of the workers takes that the endpoint has at least."""
    each = devices_of_worker(spec)
    return [each] * round(least_devices(spec) / each)


def _more_workers(spec: EndpointSpec) -> list[float]:
    """What each of the workers takes that the endpoint may have beyond these."""
    if spec.adapter_of is not None:
        return []
    workers = spec.most_workers + spec.most_prefill_workers
    return [devices_of_worker(spec)] * (workers - len(_least_workers(spec)))


def _whole(amounts: list[float]) -> int:
    number = math.ceil(sum(amounts) - 1e-6)
    while not fit_together(amounts, number):
        number += 1
    return number


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun.removesuffix('s') if number == 1 else noun}"


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
