"""Node servers that do not answer: once, for long, or never again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import pytest

from dynamo_local.core.errors import SilentNodeError, StateError, SupervisorError, UsageError
from dynamo_local.core.names import MAIN
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits, RemoveWorker
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.changes import Ports
from dynamo_local.supervisor.places.capacity import device_count
from dynamo_local.supervisor.places.cluster import ClusterNode
from dynamo_local.supervisor.places.clustered import Seen
from dynamo_local.supervisor.places.port import LogPart
from dynamo_local.supervisor.server.nodes import NodeKeeper
from state.statefile.transitions import restart, retire
from tests.places_contract import NAMESPACE, ONE, worker
from tests.unit.supervisor.actuator.fake_ports import blueprint
from tests.unit.supervisor.places.cluster_site import SUBJECTS, ClusterInMemory

FOR_LONG = 1_000


def actuator_of(site: ClusterInMemory) -> LocalActuator:
    head = site.head
    ports = Ports(
        namespace=NAMESPACE,
        books=site.books,
        places=site.places,
        fleet=head,
        lock=asyncio.Lock(),
        change_role=head.change_role,
        report=head.report,
        clock=lambda: head.now,
    )
    return LocalActuator(ports, blueprint(), endpoint=MAIN)


async def test_nodes_are_asked_at_the_same_time_and_dead_ones_not_at_all(site: ClusterInMemory) -> None:
    (first, node), (second, other) = await site.worker(0), await site.worker(1)
    bus = site.memory_bus
    for node_name in (node, other):
        site.miss(node_name, FOR_LONG)
    bus.most_at_once = 0
    assert await site.places.statuses() == {str(first): "unknown", str(second): "unknown"}
    assert bus.most_at_once == 2
    site.cluster.dead.add(node)
    # The cluster may be wrong.
    site.heard.add(str(first))
    bus.asked.clear()
    assert await site.places.statuses() == {str(first): "unknown", str(second): "unknown"}
    await site.places.places()
    assert set(bus.asked) == {SUBJECTS.node(other)}


async def test_one_answer_that_is_missed_ends_no_node_server(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    await site.worker(1)
    site.miss(node, 2)
    assert (await site.places.reserve(worker(2), ONE)).node == node
    assert site.ended == []


async def test_a_silent_node_server_whose_workers_are_heard_is_not_ended_for_another_worker(
    site: ClusterInMemory,
) -> None:
    first, node = await site.worker(0)
    await site.worker(1)
    site.heard.add(str(first))
    site.miss(node, FOR_LONG)
    with pytest.raises(SilentNodeError, match="its workers are heard"):
        await site.places.reserve(worker(2), ONE)
    assert site.ended == []
    assert len(site.cluster.reserved) == 2
    # The next one goes elsewhere, as long as there is room.
    assert (await site.places.reserve(worker(2), ONE)).node != node
    site.heard.clear()
    site.miss(node, 3 + 1)
    assert (await site.places.reserve(worker(3), ONE)).node == node
    assert site.ended == [node]


async def test_a_reservation_whose_answer_is_lost_is_given_back(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    await site.worker(1)
    site.memory_bus.lost["ReserveOrder"] = 0
    with pytest.raises(SilentNodeError):
        await site.places.reserve(worker(2), ONE)
    assert site.reserved_on(node) == {str(worker(0))}
    assert len(site.cluster.reserved) == 2


async def test_a_reservation_that_cannot_be_given_back_stays_known(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    await site.worker(1)
    site.memory_bus.lost["ReserveOrder"] = FOR_LONG
    with pytest.raises(SilentNodeError):
        await site.places.reserve(worker(2), ONE)
    assert await site.places.leaks() == {str(worker(2))}
    site.miss(node, 0)
    assert str(worker(2)) in site.reserved_on(node)
    await actuator_of(site).reconcile()
    assert site.reserved_on(node) == {str(worker(0))}
    assert await site.places.leaks() == set()


async def test_what_only_a_node_server_has_reserved_is_released(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    await site.worker(1)
    await site.places.reserve(worker(2), ONE)
    await site.places.slots.release(str(worker(2)))
    assert await actuator_of(site).reconcile() == (f"{worker(2)} was reserved and not claimed: its devices are free",)
    assert site.reserved_on(node) == {str(worker(0))}


async def test_a_node_server_ends_with_its_last_reservation_though_the_change_is_cancelled(
    site: ClusterInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = (await site.places.reserve(worker(), ONE)).node
    release, released, go_on = site.cluster.release, asyncio.Event(), asyncio.Event()

    async def slow(name: str) -> None:
        await release(name)
        released.set()
        await go_on.wait()

    monkeypatch.setattr(site.cluster, "release", slow)
    releasing = asyncio.create_task(site.places.release(str(worker())))
    await released.wait()
    releasing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert (site.ended, site.cluster.reserved) == ([node], {})


async def test_a_restart_is_undone_where_the_node_dies(site: ClusterInMemory) -> None:
    (watcher, node), _ = await site.worker(0), await site.worker(1)
    await site.books.update(lambda state: restart(state, str(watcher)))
    actuator = actuator_of(site)
    # Only silent: it is waited for.
    site.miss(node, FOR_LONG)
    with pytest.raises(SilentNodeError):
        await actuator.reconcile()
    assert site.head.state.components[str(watcher)].phase == "restarting"
    assert await site.places.lost(await site.places.seen()) == ()
    site.cluster.dead.add(node)
    # Who keeps the nodes in order replaces it.
    assert [entry.watcher_name for entry in await site.places.lost(await site.places.seen())] == [str(watcher)]
    (note,) = await actuator.reconcile()
    assert f"node {node} is gone" in note
    assert not site.head.state.components[str(watcher)].holds


async def test_what_is_left_on_a_silent_node_is_no_reason_to_change_nothing_else(site: ClusterInMemory) -> None:
    (watcher, node), (other, _) = await site.worker(0), await site.worker(1)
    await site.books.update(lambda state: retire(state, str(watcher)))
    site.heard.add(str(watcher))
    site.miss(node, FOR_LONG)
    actuator = actuator_of(site)
    outcome = await actuator.apply(RemoveWorker(str(other), "decode"), DeviceLimits())
    assert outcome.done, outcome
    assert any(f"left unfinished for now: node {node} does not answer" in line for line in site.head.report.lines)
    assert site.head.state.components[str(watcher)].phase == "retiring"
    with pytest.raises(SilentNodeError):
        await actuator.reconcile()


@pytest.mark.parametrize("kind", [UsageError, StateError])
async def test_what_a_node_cannot_run_is_a_start_that_has_failed_and_leaves_nothing(
    site: ClusterInMemory, kind: type[UsageError | StateError]
) -> None:
    """An endpoint counts it, and says why. What was not tried for want of a device is only tried again."""
    site.refusal = kind("node a has no /models/x", "have it there")
    (outcome,) = await actuator_of(site).apply_all([AddWorker("decode", "VllmWorker")], DeviceLimits())
    name = str(worker(0))
    assert (outcome.done, outcome.watcher) == (False, name)
    assert outcome.note == f"{name} did not start: node a has no /models/x; have it there"
    assert not any(entry.holds for entry in site.head.state.components.values())
    assert site.cluster.reserved == {}


async def test_a_silent_node_server_ends_once_its_workers_are_not_heard_or_after_a_minute(
    site: ClusterInMemory,
) -> None:
    (watcher, node), _ = await site.worker(0), await site.worker(1)
    keeper = Keeper(site)
    site.heard.add(str(watcher))
    site.miss(node, FOR_LONG)
    for _ in range(5):
        await keeper.keeper.look()
    assert site.ended == []
    keeper.now = 60.0
    await keeper.keeper.look()
    assert site.ended == [node]
    # Its workers are gone with it.
    site.heard.clear()
    await keeper.keeper.look()
    assert not site.head.state.components[str(watcher)].holds


async def test_nodes_are_looked_after_while_a_worker_is_added(site: ClusterInMemory) -> None:
    (_, node), (_, other) = await site.worker(0), await site.worker(1)
    keeper = Keeper(site)
    site.cluster.dead.add(node)
    await keeper.keeper.look()
    adding = asyncio.create_task(keeper.keeper.replace())
    await keeper.adding.wait()
    site.miss(other, FOR_LONG)
    for _ in range(3):
        await keeper.keeper.look()
    assert other in site.ended
    keeper.added.set()
    await adding


async def test_lost_workers_are_not_replaced_against_a_later_order(site: ClusterInMemory) -> None:
    (_, node), _ = await site.worker(0), await site.worker(1)
    await site.worker(2)
    fourth, _ = await site.worker(3)
    keeper = Keeper(site)
    site.cluster.dead.add(node)
    for _ in range(3):
        await keeper.keeper.look()
    assert (await actuator_of(site).apply(RemoveWorker(str(fourth), "decode"), DeviceLimits())).done
    await keeper.keeper.look()
    await keeper.keeper.replace()
    assert not keeper.adding.is_set()
    assert "VllmWorker: workers that were lost are not replaced" in "".join(site.head.report.lines)


async def test_a_worker_that_somebody_else_found_lost_is_replaced(site: ClusterInMemory) -> None:
    (_, node), _ = await site.worker(0), await site.worker(1)
    await site.worker(2)
    keeper = Keeper(site)
    keeper.added.set()
    await keeper.keeper.look()
    site.cluster.dead.add(node)
    await actuator_of(site).reconcile()
    await keeper.keeper.look()
    await keeper.keeper.replace()
    assert keeper.count == 2


async def test_a_worker_that_is_removed_during_a_look_is_not_lost(
    site: ClusterInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the cluster takes long to answer."""
    removed, _ = await site.worker(0)
    await site.worker(1)
    await site.worker(2)
    keeper, nodes = Keeper(site), site.cluster.nodes
    keeper.added.set()
    await keeper.keeper.look()

    async def slow() -> Mapping[str, ClusterNode]:
        monkeypatch.setattr(site.cluster, "nodes", nodes)
        assert (await actuator_of(site).apply(RemoveWorker(str(removed), "decode"), DeviceLimits())).done
        return await nodes()

    monkeypatch.setattr(site.cluster, "nodes", slow)
    for _ in range(3):
        await keeper.keeper.look()
    await keeper.keeper.replace()
    assert keeper.count == 0


async def test_a_second_loss_is_no_order(site: ClusterInMemory) -> None:
    (_, node), _ = await site.worker(0), await site.worker(1)
    keeper = Keeper(site)
    keeper.added.set()
    site.cluster.dead.add(node)
    for _ in range(3):
        await keeper.keeper.look()
    site.cluster.dead |= set(site.machines)
    for _ in range(3):
        await keeper.keeper.look()
    await keeper.keeper.replace()
    assert keeper.count == 2


async def test_a_node_that_joins_is_used_without_another_look(site: ClusterInMemory) -> None:
    (_, node) = await site.worker(0)
    keeper = Keeper(site)
    keeper.added.set()
    keeper.failures = 1
    site.cluster.dead.add(node)
    for _ in range(3):
        await keeper.keeper.look()
    with pytest.raises(SupervisorError):
        await keeper.keeper.replace()
    await keeper.keeper.replace()
    assert keeper.count == 0, "it waits before it tries again"
    site.cluster.dead.remove(node)
    await keeper.keeper.replace()
    assert keeper.count == 1


async def test_a_look_asks_the_cluster_for_its_nodes_once(site: ClusterInMemory) -> None:
    await site.worker(0)
    keeper, before = Keeper(site), site.cluster.asked
    await keeper.keeper.look()
    assert site.cluster.asked == before + 1


async def test_nodes_are_not_counted_beside_the_looks_for_ever(site: ClusterInMemory) -> None:
    _, node = await site.worker(0)
    keeper = Keeper(site)
    keeper.failures = 1
    site.cluster.dead.add(node)
    for _ in range(3):
        await keeper.keeper.look()
    with pytest.raises(SupervisorError):
        await keeper.keeper.replace()
    before, keeper.now = keeper.counted, 0.5
    await keeper.keeper.replace()
    assert keeper.counted == before + 1
    keeper.failures, keeper.now = FOR_LONG, 60.0
    with pytest.raises(SupervisorError):
        await keeper.keeper.replace()
    await keeper.keeper.replace()
    assert keeper.counted == before + 1
    # A node that joins is used all the same.
    keeper.failures = 0
    keeper.added.set()
    site.cluster.dead.remove(node)
    await keeper.keeper.look()
    await keeper.keeper.replace()
    assert keeper.count == 1


async def test_nodes_say_which_workers_they_have_given_up(site: ClusterInMemory) -> None:
    watcher, node = await site.worker(0)
    site.given_up[node][str(watcher)] = "it has ended 5 times"
    assert not await site.places.silent(await site.places.seen())
    assert site.places.given_up == {str(watcher): "it has ended 5 times"}
    # Who does not answer has not said that it starts them again.
    site.miss(node, 1)
    await site.places.silent(await site.places.seen())
    assert site.places.given_up == {str(watcher): "it has ended 5 times"}
    site.given_up[node].clear()
    await site.places.silent(await site.places.seen())
    assert site.places.given_up == {}


async def test_the_log_of_a_worker_that_is_gone_is_not_read_again_from_its_beginning(site: ClusterInMemory) -> None:
    assert await site.places.log(str(worker(7)), 5, after=123) == LogPart((), 123)


async def test_a_silent_node_is_asked_for_none_of_its_logs(site: ClusterInMemory) -> None:
    first, node = await site.worker(0)
    site.miss(node, FOR_LONG)
    await site.places.silent(await site.places.seen())
    site.memory_bus.asked.clear()
    with pytest.raises(SilentNodeError, match=f"node {node} does not answer"):
        await site.places.log(str(first), 5)
    assert site.memory_bus.asked == []


async def test_a_node_server_that_is_starting_is_not_silent(site: ClusterInMemory) -> None:
    start = site.cluster.start
    seen: list[dict[str, bool]] = []

    async def starts(node: str, order: bytes) -> None:
        seen.append(dict(await site.places.silent(await site.places.seen())))
        await start(node, order)

    site.cluster.start = starts
    await site.worker(0)
    assert seen == [{}]


class Keeper:
    """`failures`: of the next attempts to add one. `counted`: how often devices were. `adding`: set once one is added,
    which lasts until `added` is."""

    def __init__(self, site: ClusterInMemory) -> None:
        self.now = 0.0
        self.adding, self.added = asyncio.Event(), asyncio.Event()
        self.count = self.counted = self.failures = 0
        self.site = site
        self.keeper = NodeKeeper(
            *(site.places, self._add, self._reconcile, self._count, lambda _: "decode", lambda _: MAIN),
            replaces=True,
            report=site.head.report,
            clock=lambda: self.now,
        )

    async def _add(self, changes: Sequence[AddWorker]) -> None:
        if self.failures:
            self.failures -= 1
            raise SupervisorError("there is no room")
        self.adding.set()
        await self.added.wait()
        self.count += len(changes)

    async def _count(self, seen: Seen) -> float:
        self.counted += 1
        return device_count(self.site.places.capacity(seen).values())

    async def _reconcile(self, endpoints: Collection[str]) -> None:
        assert endpoints == {MAIN}
        await actuator_of(self.site).reconcile()
