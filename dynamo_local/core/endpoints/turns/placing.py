"""Which devices workers would get, given the room of each device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamo_local.core.shares import devices_of, fits, share_of, summed

Room = Mapping[int, float]
"""What is left of each device, by its id: 1 is all of it."""


def placed(room: Room, amounts: Iterable[float]) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each of the workers that take these amounts, in their order: whole devices of the lowest ids; for
    a share the device with the least room that is enough. None if they do not all fit."""
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
    if len(roomy) < number:
        return None
    if share < 1:
        return (min(roomy, key=lambda device: (room[device], device)),)
    return tuple(roomy[:number])
