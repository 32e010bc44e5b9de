"""Devices of nodes that others hold, as the cluster's count is late and the graph's books change."""

from __future__ import annotations

from state.statefile.transitions import release, retire
from tests.places_contract import ONE, worker
from tests.unit.supervisor.places.cluster_site import ClusterInMemory


async def test_what_is_not_given_back_yet_is_not_held_by_others(site: ClusterInMemory) -> None:
    watcher, node = await site.worker(0)
    assert site.places.capacity(await site.places.seen())[node].others == 0
    await site.books.update(lambda state: retire(state, str(watcher)))
    await site.books.update(lambda state: release(state, str(watcher)))
    assert site.places.capacity(await site.places.seen())[node].others == 0
    # What others hold is seen all the same.
    site.cluster.reserved["theirs"] = (node, 1.0)
    assert site.places.capacity(await site.places.seen())[node].others == 1


async def test_what_is_being_reserved_is_not_held_by_others(site: ClusterInMemory) -> None:
    """No endpoint yields its devices for it meanwhile: a node server takes seconds to start."""
    start = site.cluster.start
    seen: list[float] = []

    async def starts(node: str, order: bytes) -> None:
        await start(node, order)
        seen.append(site.places.capacity(await site.places.seen())[node].others)

    site.cluster.start = starts
    await site.places.reserve(worker(0), ONE)
    seen += [room.others for room in site.places.capacity(await site.places.seen()).values()]
    assert seen == [0, 0, 0]


async def test_what_was_given_back_is_not_held_by_others_before_the_cluster_counts_it(site: ClusterInMemory) -> None:
    site.places.slots.clock = lambda: 0.0
    watcher, node = await site.worker(0)
    await site.places.end(str(watcher), 0.0)
    await site.books.update(lambda state: release(retire(state, str(watcher)), str(watcher)))
    await site.places.release(str(watcher))
    # Ray's count of what is free runs after the table of what is reserved.
    site.cluster.reserved["late"] = (node, 1.0)
    assert site.places.capacity(await site.places.seen())[node].others == 0
