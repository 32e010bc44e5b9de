"""Shares of devices, and which devices workers get: 1 is a whole device, 0.5 is half of one. Pure.

A worker takes a whole number of devices, or a share of a single one. Shares on a device add up to at most 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LEAST_SHARE = 0.01
"""The smallest share of a device that a worker can take."""

_DUST = 1e-6
"""Tolerated in sums, so that three times a third of a device, written with seven digits, is one device."""


def devices_of(gpu: float) -> int:
    """The number of devices of a worker that takes `gpu`: 1 for a share of one."""
    return 1 if 0 < gpu < 1 else int(gpu)


def share_of(gpu: float) -> float:
    """The share that a worker which takes `gpu` has of each of its devices."""
    return gpu if 0 < gpu < 1 else 1.0


def held(devices: int, share: float) -> float:
    """Inverse of `devices_of` and `share_of`: what so many devices count for. A whole number if they are held whole."""
    return devices if share == 1 else devices * share


def summed(amounts: Iterable[float]) -> float:
    """The sum, without the dust of binary fractions; a whole number if all amounts are."""
    return round(sum(amounts), 6)


def fits(taken: float, more: float, most: float = 1) -> bool:
    """Whether `more` can be taken where `taken` of `most` is already."""
    return taken + more <= most + _DUST


def times_in_one(share: float) -> int:
    """How many workers with such a share one device has room for."""
    return int((1 + _DUST) / share)


def shown_devices(ids: Iterable[int], share: float = 1.0) -> str:
    """Ids of a worker's devices for people: "0,1", or "0 (0.5)" for a share of one. Empty without devices."""
    listed = ",".join(map(str, ids))
    return listed if share == 1 or not listed else f"{listed} ({share:g})"


Left = Mapping[int, float]
"""What is left of each device, by its id: 1 is all of it. Devices of several nodes have ids of `on_node`."""

PER_NODE = 1 << 16
"""Ids of one node's devices are below this, and those of the next node follow."""


def on_node(node: int, devices: Iterable[int]) -> tuple[int, ...]:
    """Ids, among those of all nodes, of devices of a node. `node`: its number."""
    return tuple(node * PER_NODE + device for device in devices)


def node_of(device: int) -> int:
    """The number of a device's node, by its id among those of all nodes."""
    return device // PER_NODE


def placed(left: Left, amounts: Iterable[float]) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each of the workers that take these amounts, in their order: whole devices of the lowest ids,
    on one node; for a share the device with the least room that is enough. None if they do not all fit."""
    left, found = dict(left), []
    for amount in amounts:
        ids = _devices(left, amount)
        if ids is None:
            return None
        left = less(left, ids, share_of(amount))
        found.append(ids)
    return tuple(found)


def less(left: Left, devices: Iterable[int], share: float) -> dict[int, float]:
    """What is left after a worker has taken its share of each of these devices."""
    return {**left, **{device: max(0.0, summed([left.get(device, 0.0), -share])) for device in devices}}


def more(left: Left, devices: Iterable[int], share: float) -> dict[int, float]:
    """What is left after a worker has given back its share of each of these devices."""
    return {**left, **{device: summed([left.get(device, 0.0), share]) for device in devices}}


def _devices(left: Left, amount: float) -> tuple[int, ...] | None:
    number, share = devices_of(amount), share_of(amount)
    if number == 0:
        return ()
    roomy = sorted(device for device, part in left.items() if fits(1 - part, share))
    if share < 1:
        return (min(roomy, key=lambda device: (left[device], device)),) if roomy else None
    nodes: dict[int, list[int]] = {}
    for device in roomy:
        nodes.setdefault(node_of(device), []).append(device)
    return next((tuple(ids[:number]) for ids in nodes.values() if len(ids) >= number), None)


def fit_together(amounts: Iterable[float], devices: int) -> bool:
    """Whether so many devices have room for workers that take these amounts, whole devices first, then the largest
    shares, each where the least room is enough."""
    wanted = sorted((amount for amount in amounts if amount > 0), reverse=True)
    return placed(dict.fromkeys(range(devices), 1.0), wanted) is not None
