"""Which devices workers would get, given the room of each device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamo_local.core.shares import devices_of, fits, share_of, summed

Room = Mapping[int, float]
"""What is left of each device, by its id: 1 is all of it. Devices of several nodes have ids of `on_node`."""

PER_NODE = 1 << 16
"""Ids of one node's devices are below this, and those of the next node follow."""


def on_node(node: int, devices: Iterable[int]) -> tuple[int, ...]:
    """Ids, among those of all nodes, of devices of a node. `node`: its number."""
    return tuple(node * PER_NODE + device for device in devices)


def node_of(device: int) -> int:
    """The number of a device's node, by its id among those of all nodes."""
    return device // PER_NODE


def placed(room: Room, amounts: Iterable[float]) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each of the workers that take these amounts, in their order: whole devices of the lowest ids,
    on one node; for a share the device with the least room that is enough. None if they do not all fit."""
    left, found = dict(room), []
    for amount in amounts:
        ids = _devices(left, amount)
        if ids is None:
            return None
        left = less(left, ids, share_of(amount))
        found.append(ids)
    return tuple(found)


def less(room: Room, devices: Iterable[int], share: float) -> dict[int, float]:
    """The room after a worker has taken its share of each of these devices."""
    return {**room, **{device: max(0.0, summed([room.get(device, 0.0), -share])) for device in devices}}


def more(room: Room, devices: Iterable[int], share: float) -> dict[int, float]:
    """The room after a worker has given back its share of each of these devices."""
    return {**room, **{device: summed([room.get(device, 0.0), share]) for device in devices}}


def _devices(room: Room, amount: float) -> tuple[int, ...] | None:
    number, share = devices_of(amount), share_of(amount)
    roomy = sorted(device for device, left in room.items() if fits(1 - left, share))
    if share < 1:
        return (min(roomy, key=lambda device: (room[device], device)),) if roomy else None
    nodes: dict[int, list[int]] = {}
    for device in roomy:
        nodes.setdefault(node_of(device), []).append(device)
    return next((tuple(ids[:number]) for ids in nodes.values() if len(ids) >= number), None)
