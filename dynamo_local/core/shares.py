"""Shares of devices: 1 is a whole device, 0.5 is half of one. Pure.

A worker takes a whole number of devices, or a share of a single one. Shares on a device add up to at most 1.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def fit_together(amounts: Iterable[float], devices: int) -> bool:
    """Whether so many devices have room for workers that take these amounts, whole devices first, then the largest
    shares, each where the least room is enough."""
    wanted = sorted(amounts, reverse=True)
    left = devices - sum(int(amount) for amount in wanted if amount >= 1)
    taken = [0.0] * max(left, 0)
    for share in (amount for amount in wanted if 0 < amount < 1):
        roomy = [index for index, part in enumerate(taken) if fits(part, share)]
        if not roomy:
            return False
        fullest = max(roomy, key=lambda index: taken[index])
        taken[fullest] += share
    return left >= 0


def shown_devices(ids: Iterable[int], share: float = 1.0) -> str:
    """Ids of a worker's devices for people: "0,1", or "0 (0.5)" for a share of one. Empty without devices."""
    listed = ",".join(map(str, ids))
    return listed if share == 1 or not listed else f"{listed} ({share:g})"
