"""Whether an endpoint's workers can serve its adapters, as far as its arguments tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointConflictError

SLOTS = 4
"""Adapters of endpoints that a worker has room for, where max-loras does not say another number."""

RANK = 16
"""Largest rank of an adapter, where max-lora-rank does not say another number: vLLM's own default."""

_ENABLE, _SLOTS, _RANK, _STATIC = "enable-lora", "max-loras", "max-lora-rank", "lora-modules"
_SHOWN = 3


def check_adapters(spec: EndpointSpec, others: Iterable[EndpointSpec], *, on_cpu: bool) -> None:
    """Raise EndpointConflictError if workers of `spec`, or of its base if it is an adapter, cannot serve the adapters
    of that endpoint. A worker on a CPU has all of them at the same time; one on a GPU exchanges them."""
    specs = {other.name: other for other in others} | {spec.name: spec}
    base = specs.get(spec.adapter_of or spec.name)
    adapters = [one.name for one in specs.values() if base is not None and one.adapter_of == base.name]
    if base is None or not adapters:
        return
    if not takes_adapters(base):
        raise _not_enabled(spec, base, adapters)
    room = room_of(base)
    if on_cpu and base.engine == "vllm" and len(adapters) > room:
        raise EndpointConflictError(
            f"endpoint {spec.name}: {base.name} has room for {_adapters(room)}, and is the base of {_named(adapters)}",
            f"set {_SLOTS} of {base.name} to {len(adapters) + _static(base)} or more",
        )


def takes_adapters(base: EndpointSpec) -> bool:
    """Whether workers of `base` can serve adapters at all."""
    return base.args.get(_ENABLE) in (True, "true")


def room_of(base: EndpointSpec) -> int:
    """How many adapters of endpoints a worker of `base` can have at the same time."""
    given = base.args.get(_SLOTS)
    return max((given if isinstance(given, int) else SLOTS) - _static(base), 0)


def most_rank(base: EndpointSpec) -> int:
    """The largest rank of an adapter that workers of `base` take."""
    given = base.args.get(_RANK)
    return given if isinstance(given, int) else RANK


def _static(base: EndpointSpec) -> int:
    """Adapters that the base has by its own arguments."""
    given = base.args.get(_STATIC) or ()
    return 1 if isinstance(given, str) else len(given)


def _not_enabled(spec: EndpointSpec, base: EndpointSpec, adapters: list[str]) -> EndpointConflictError:
    if spec.name == base.name:
        return EndpointConflictError(
            f"endpoint {base.name} is the base of {_named(adapters)}, and takes no adapters without {_ENABLE}",
            f"keep args.{_ENABLE}, or delete its adapters first",
        )
    return EndpointConflictError(
        f"endpoint {spec.name}: its base {base.name} takes no adapters",
        f"set {_ENABLE} of it: dynamo endpoint update {base.name} --set args.{_ENABLE}=true",
    )


def _named(adapters: list[str]) -> str:
    more = "" if len(adapters) <= _SHOWN else f" and {len(adapters) - _SHOWN} more"
    return f"{_adapters(len(adapters))} ({', '.join(adapters[:_SHOWN])}{more})"


def _adapters(number: int) -> str:
    return f"{number} adapter" if number == 1 else f"{number} adapters"
