"""Which CPU cores are left to processes that compute no tokens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from state.devices import Inventory


def cores_beside(inventory: Inventory, everywhere: Collection[int], decoding: Iterable[int]) -> frozenset[int]:
    """The cores of the machine that none of the `decoding` devices has; all of them if that leaves none.

    On a machine with few cores an engine's step is as long as the others let it be: frontend, router, NATS and the
    workers' own processes wake up for every token. A prefill worker's core is theirs as well, for who waits for a
    prompt waits for many steps anyway.
    """
    taken = {core for device_id in decoding for core in inventory.device(device_id).cores}
    return frozenset(everywhere) - taken or frozenset(everywhere)
