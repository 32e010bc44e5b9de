"""Chooses the CPU cores for processes that compute no tokens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from state.devices.allocation import Inventory


def cores_beside(inventory: Inventory, everywhere: Collection[int], decoding: Iterable[int]) -> frozenset[int]:
    """The cores of `everywhere` that belong to no `decoding` device; all of them if that leaves none.

    On a machine with few cores, other processes prolong an engine's step: frontend, router, NATS and the workers' own
    processes wake up for every token. They may share cores with prefill workers, because a prompt takes as long as many
    steps anyway.
    """
    taken = {core for device_id in decoding for core in inventory.device(device_id).cores}
    return frozenset(everywhere) - taken or frozenset(everywhere)
