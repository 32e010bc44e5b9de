"""Room for LoRA adapters in the workers of an endpoint, which is settled when they start. Pure.

Arguments that its owner has given (`enable-lora`, `max-loras`, `max-lora-rank`) say how much there is. For those that
were not given, the server keeps an `AdapterRoom` in the spec, and raises it when an adapter is ordered that does not
fit: with it the endpoint has another revision. What the owner has given is changed only if the order says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_local.core.endpoints.spec import AdapterRoom, EndpointSpec
from dynamo_local.core.errors import EndpointConflictError

SLOTS = 4
"""Adapters of endpoints that a worker has room for, where nothing says another number."""

RANK = 16
"""Largest rank of an adapter, where nothing says another number: vLLM's own default."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as max-lora-rank (`vllm.config.lora.MaxLoRARanks`)."""

_ENABLE, _SLOTS, _RANK, _STATIC = "enable-lora", "max-loras", "max-lora-rank", "lora-modules"
_SHOWN = 3

Ranks = Mapping[str, int]
"""Adapters of an endpoint in the order of their creation, each with its rank; 0: not known."""


def shortage(base: EndpointSpec, adapters: Ranks, *, on_cpu: bool) -> str:
    """Why workers of `base` cannot serve all of these adapters, as a clause; empty if they can. A worker on a CPU has
    all of them at the same time; one on a GPU exchanges them."""
    if not adapters:
        return ""
    if not takes_adapters(base):
        return "its workers were started without room for adapters"
    if base.engine != "vllm":
        return ""
    if large := _largest(adapters, most_rank(base)):
        return f"its workers were started for adapters of rank {most_rank(base)}, and {large} has {adapters[large]}"
    if on_cpu and len(adapters) > room_of(base):
        return f"its workers were started with room for {_adapters(room_of(base))}, and this is one more"
    return ""


def served_on(base: EndpointSpec, adapters: Ranks, *, on_cpu: bool) -> tuple[str, ...]:
    """The adapters that workers of `base` can serve: the earliest of `adapters`, where there is no room for all."""
    if not takes_adapters(base):
        return ()
    if base.engine != "vllm":
        return tuple(adapters)
    found = tuple(name for name, rank in adapters.items() if rank <= most_rank(base))
    return found[: room_of(base)] if on_cpu else found


def with_room(base: EndpointSpec, adapters: Ranks, *, on_cpu: bool, of: str = "", roll: bool = False) -> EndpointSpec:
    """The base with room for these adapters, and for further ones if more is needed than it has; itself if it has room.

    `of`: the adapter that is ordered; without it, the order is about the base. `roll`: arguments that its owner has
    given may be changed. Raises EndpointConflictError if they may not and leave no room, or if no worker could have it.
    """
    if not shortage(base, adapters, on_cpu=on_cpu):
        return base
    is_vllm, before = base.engine == "vllm", base.adapter_room or AdapterRoom(SLOTS, RANK)
    needed = len(adapters) + _static(base) if is_vllm and on_cpu else 0
    rank = _rank_for(adapters) if is_vllm else 0
    args, given = dict(base.args), _given(base)
    if given.get(_ENABLE) is False:
        _check(roll or _not_enabled(base, adapters, of))
        args[_ENABLE] = True
    if given.get(_SLOTS, needed) < needed:
        _check(roll or _too_few(base, adapters, of))
        args[_SLOTS] = _with_headroom(needed)
    if given.get(_RANK, rank) < rank:
        _check(roll or _too_small(base, adapters, of))
        args[_RANK] = rank
    slots = before.slots if before.slots >= needed else _with_headroom(needed)
    room = AdapterRoom(slots, max(before.rank, rank))
    return msgspec.structs.replace(base, args=args, adapter_room=room)


def settings_of(base: EndpointSpec) -> dict[str, Any]:
    """The arguments of the endpoint's frontend and workers: its own, and those that its room stands for."""
    room = base.adapter_room
    if room is None or _given(base).get(_ENABLE) is False:
        return base.args
    chosen: dict[str, Any] = {_ENABLE: True}
    if room.slots > SLOTS:
        chosen[_SLOTS] = room.slots
    if room.rank > RANK:
        chosen[_RANK] = room.rank
    return chosen | base.args


def takes_adapters(base: EndpointSpec) -> bool:
    """Whether workers of `base` can serve adapters at all."""
    return bool(_given(base).get(_ENABLE, base.adapter_room is not None))


def room_of(base: EndpointSpec) -> int:
    """How many adapters of endpoints a worker of `base` can have at the same time."""
    chosen = SLOTS if base.adapter_room is None else max(SLOTS, base.adapter_room.slots)
    return max(_given(base).get(_SLOTS, chosen) - _static(base), 0)


def most_rank(base: EndpointSpec) -> int:
    """The largest rank of an adapter that workers of `base` take."""
    chosen = RANK if base.adapter_room is None else max(RANK, base.adapter_room.rank)
    return _given(base).get(_RANK, chosen)


def _given(base: EndpointSpec) -> dict[str, int]:
    """What the owner has given, as far as it can be read."""
    given: dict[str, int] = {name: base.args[name] for name in (_SLOTS, _RANK) if isinstance(base.args.get(name), int)}
    if (enable := base.args.get(_ENABLE)) is not None:
        given[_ENABLE] = enable in (True, "true")
    return given


def _with_headroom(adapters: int) -> int:
    slots = SLOTS
    while slots <= adapters:
        slots *= 2
    return slots


def _rank_for(adapters: Ranks) -> int:
    """The smallest max-lora-rank for these adapters."""
    most = max(adapters.values(), default=0)
    if most > RANKS[-1]:
        name = _largest(adapters, RANKS[-1])
        raise EndpointConflictError(
            f"adapter {name} has rank {most}, and vLLM takes {RANKS[-1]} at most", "train it with a smaller rank"
        )
    return next(rank for rank in RANKS if rank >= most)


def _largest(adapters: Ranks, most: int) -> str:
    """The adapter with the largest rank, if that is above `most`."""
    name = max(adapters, key=lambda one: adapters[one], default="")
    return name if name and adapters[name] > most else ""


def _static(base: EndpointSpec) -> int:
    """Adapters that the base has by its own arguments."""
    given = base.args.get(_STATIC) or ()
    return 1 if isinstance(given, str) else len(given)


def _check(allowed: EndpointConflictError | bool) -> None:
    if isinstance(allowed, EndpointConflictError):
        raise allowed


def _not_enabled(base: EndpointSpec, adapters: Ranks, of: str) -> EndpointConflictError:
    if not of:
        return EndpointConflictError(
            f"endpoint {base.name} is the base of {_named(adapters)}, and takes no adapters with {_ENABLE}: false",
            f"leave out args.{_ENABLE}, or delete its adapters first",
        )
    return EndpointConflictError(
        f"endpoint {of}: its base {base.name} takes no adapters, by its {_ENABLE}: false",
        f"dynamo endpoint update {base.name} --unset args.{_ENABLE}, or {_order_roll(base)}",
    )


def _too_few(base: EndpointSpec, adapters: Ranks, of: str) -> EndpointConflictError:
    number = len(adapters) + _static(base)
    raised = f"set {_SLOTS} of {base.name} to {number} or more"
    return EndpointConflictError(
        f"endpoint {of or base.name}: {base.name} has room for {_adapters(room_of(base))} by its {_SLOTS}, and is the "
        f"base of {_named(adapters)}",
        f"{raised}, or {_order_roll(base)}" if of else raised,
    )


def _too_small(base: EndpointSpec, adapters: Ranks, of: str) -> EndpointConflictError:
    name = _largest(adapters, most_rank(base))
    raised = f"set {_RANK} of {base.name} to {_rank_for(adapters)}"
    return EndpointConflictError(
        f"endpoint {of or base.name}: adapter {name} has rank {adapters[name]}, and {base.name} takes "
        f"{most_rank(base)} at most by its {_RANK}",
        f"{raised}, or {_order_roll(base)}" if of else raised,
    )


def _order_roll(base: EndpointSpec) -> str:
    return f'order it with --roll ("roll": true), which changes the args of {base.name}'


def _named(adapters: Ranks) -> str:
    names = list(adapters)
    more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
    return f"{_adapters(len(names))} ({', '.join(names[:_SHOWN])}{more})"


def _adapters(number: int) -> str:
    return f"{number} adapter" if number == 1 else f"{number} adapters"
