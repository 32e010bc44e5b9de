"""Nodes on which nothing can be started, or that do not answer: others are chosen first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dynamo_local.core.errors import DeviceError, NodeStartError
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from tests.places_contract import NAMESPACE, ONE, worker
from tests.unit.supervisor.places.cluster_site import ClusterInMemory
from tests.unit.supervisor.places.test_cluster_silence import actuator_of


async def refuses(site: ClusterInMemory) -> str:
    """Have the node that comes first start no node server, and try it. Returns it."""
    start, failing = site.cluster.start, next(iter(await site.cluster.nodes()))

    async def starts(node: str, order: bytes) -> None:
        if node == failing:
            raise NodeStartError(f"no node server runs on node {node}: vllm 1 is installed, and the head has 2")
        await start(node, order)

    site.cluster.start = starts
    with pytest.raises(NodeStartError, match="vllm 1 is installed"):
        await site.places.reserve(worker(0), ONE)
    return failing


async def test_a_node_without_a_node_server_is_chosen_last(site: ClusterInMemory) -> None:
    failing = await refuses(site)
    assert site.cluster.reserved == {}
    assert {name: room.is_failing for name, room in site.places.capacity(await site.places.seen()).items()} == {
        "a": True,
        "b": False,
    }
    for index in range(2):
        assert (await site.places.reserve(worker(index), ONE)).node != failing
    with pytest.raises(NodeStartError):
        await site.places.reserve(worker(2), ONE)


async def test_an_endpoint_counts_a_start_on_a_node_without_a_node_server(site: ClusterInMemory) -> None:
    await refuses(site)
    for index in range(2):
        await site.worker(index)
    add = AddWorker("decode", "VllmWorker")
    (outcome,) = await actuator_of(site).apply_all([add], DeviceLimits())
    assert (outcome.done, outcome.watcher, outcome.node_failed) == (False, None, True)
    assert "vllm 1 is installed" in outcome.note
    outcome = await actuator_of(site).apply(add, DeviceLimits())
    assert (outcome.done, outcome.node_failed) == (False, True)


async def test_a_node_that_runs_again_is_as_good_as_others(site: ClusterInMemory) -> None:
    failing = await refuses(site)
    now = site.places.servers.clock()
    site.places.servers.clock = lambda: now + 61
    assert not site.places.capacity(await site.places.seen())[failing].is_failing
    with pytest.raises(NodeStartError):
        await site.places.reserve(worker(0), ONE)
    site.cluster.start = site._start
    # Whoever has decided for it gets it.
    assert (await site.places.reserve(worker(0), replace(ONE, node=failing))).node == failing
    assert not site.places.capacity(await site.places.seen())[failing].is_failing


async def test_a_node_that_does_not_answer_is_chosen_last_from_the_first_look_on(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    await site.places.silent(await site.places.seen())
    site.miss(node, 1_000)
    assert set(await site.places.silent(await site.places.seen())) == {node}
    assert (await site.places.reserve(worker(1), ONE)).node != node
    # Another node server may run there.
    await site.places.give_up(node)
    site.miss(node, 0)
    assert (await site.places.reserve(worker(2), ONE)).node == node


async def test_a_reservation_that_was_left_elsewhere_is_not_taken(site: ClusterInMemory) -> None:
    made = await site.places.reserve(worker(0), ONE)
    other = next(node for node in await site.cluster.nodes() if node != made.node)
    with pytest.raises(DeviceError, match=f"is to live on {other}"):
        await site.places.reserve(worker(0), replace(ONE, node=other))
    assert site.cluster.reserved[f"{NAMESPACE}/{worker(0)}"][0] == made.node
