"""What is reserved with a cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from dynamo_local.core.errors import DeviceError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.cluster import Slot
from dynamo_local.supervisor.places.clustered import Slots
from dynamo_local.supervisor.places.port import Need
from tests.memory_cluster import MemoryCluster


class SilentCluster(MemoryCluster):
    """Does not say what is reserved."""

    async def reservations(self) -> Mapping[str, Slot]:
        raise SupervisorError("it does not answer")


async def test_node_servers_are_ended_although_nobody_knows_what_is_reserved() -> None:
    cluster = SilentCluster({"a": 1, "b": 1})
    cluster.running |= {"a", "b"}
    with pytest.raises(SupervisorError, match="it does not answer"):
        await Slots(cluster, "far").clear({"a"})
    assert cluster.running == {"b"}


async def test_what_is_reserved_and_not_claimed_yet_is_known_while_it_is_being_made() -> None:
    seen: list[list[tuple[str, float]]] = []

    class SlowCluster(MemoryCluster):
        async def reserve(self, name: str, need: Need, avoid: Collection[str] = ()) -> Slot:
            slot = await super().reserve(name, need, avoid)
            seen.append(slots.unclaimed((), await slots.all()))
            return slot

    slots = Slots(SlowCluster({"a": 2}), "far")
    await slots.reserve(Watcher("far", "VllmWorker"), Need("decode", 2))
    assert seen == [[("a", 2)]]
    assert slots.unclaimed({"far_VllmWorker"}, await slots.all()) == []


async def test_what_was_given_back_is_known_until_the_cluster_counts_it() -> None:
    now = 0.0
    slots = Slots(MemoryCluster({"a": 2}), "far", clock=lambda: now)
    await slots.reserve(Watcher("far", "VllmWorker"), Need("decode", 1, share=0.5))
    await slots.release("far_VllmWorker")
    assert slots.unclaimed((), await slots.all()) == [("a", 0.5)]
    # It is counted once, where the name is used again.
    await slots.reserve(Watcher("far", "VllmWorker"), Need("decode", 1))
    assert slots.unclaimed((), await slots.all()) == [("a", 1)]
    await slots.release("far_VllmWorker")
    now = 2.0
    assert slots.unclaimed((), await slots.all()) == []


async def test_what_no_node_has_free_is_not_reserved() -> None:
    slots = Slots(MemoryCluster({"a": 1}), "far")
    with pytest.raises(DeviceError, match="VllmWorker needs 2 devices"):
        await slots.reserve(Watcher("far", "VllmWorker"), Need("decode", 2))
    assert slots.unclaimed((), await slots.all()) == []
