"""What is reserved with a cluster."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.places.cluster import Slot
from dynamo_local.supervisor.places.slots import Slots
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
