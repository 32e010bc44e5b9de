"""Nodes of a cluster as places: two node servers' worth of circusd and statefile, asked over a real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, Subscription
from dynamo_local.core.errors import DeviceError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.node.places import NodePlaces
from dynamo_local.supervisor.places.clustered import ClusterPlaces, Slots
from dynamo_local.supervisor.places.far import FarPlaces, PlacesService
from dynamo_local.supervisor.places.local import Books, LocalPlaces
from dynamo_local.supervisor.places.node_servers import NodeServers
from dynamo_local.supervisor.places.port import Places, Slot
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import Inventory
from state.machine.processes import this_process
from state.paths import StatePaths
from state.statefile.store import StateStore
from state.statefile.transitions import new_state, release
from tests.integration.nats_process import running_nats
from tests.integration.supervisor.test_places import CircusSite, NobodyElse, circus_site
from tests.memory_cluster import MemoryCluster
from tests.places_contract import (
    DEVICES,
    NAMESPACE,
    ONE,
    PlacesContract,
    Program,
    claimed,
    reserved,
    started,
    worker,
)

pytestmark = pytest.mark.integration

SUBJECTS = Subjects(NAMESPACE)


class NoWatchers:
    """The head's circusd, which has no process in these tests."""

    async def statuses(self) -> Mapping[str, str]:
        return {}

    async def add(self, plan: WatcherPlan) -> None:
        raise AssertionError(plan)

    async def end(self, name: str, deadline_s: float) -> None:
        raise AssertionError(name)

    async def remove(self, name: str) -> None:
        raise AssertionError(name)


class ClusterSite:
    """`heard`: watchers with a presence."""

    def __init__(self, root: Path, nodes: Mapping[str, CircusSite], bus: Bus, tasks: TaskGuard) -> None:
        store = StateStore(StatePaths(root, NAMESPACE))
        store.create(new_state(NAMESPACE, "ipc:///nowhere", "cpu-slot", this_process()))
        self.books = Books(store)
        self.heard: set[str] = set()
        self.bus = bus
        self._nodes = nodes
        self._tasks = tasks
        self._plans: dict[str, WatcherPlan] = {}
        self._served: dict[str, Subscription] = {}
        self.cluster = MemoryCluster(dict.fromkeys(nodes, DEVICES // 2), self._serve, self._silence)
        servers = NodeServers(
            self.cluster,
            node=lambda name: FarPlaces(bus, SUBJECTS.node(name), f"node {name}"),
            order=lambda node: node.node.encode(),
            graph=lambda _: b"",
            ask_again_s=0.0,
        )
        local = LocalPlaces(self.books, Inventory("cpu-slot", ()), NobodyElse(), NoWatchers(), lambda _: root / "log")
        slots = Slots(self.cluster, NAMESPACE)
        self.clustered = ClusterPlaces(servers, slots, self.books, local, heard=lambda: self.heard, kind="cpu-slot")
        self.places: Places = self.clustered

    def plan(self, watcher: Watcher, slot: Slot, program: Program) -> WatcherPlan:
        plan = self._nodes[slot.node].plan(watcher, slot, program)
        self._plans[plan.name] = plan
        return replace(plan, node=slot.node)

    async def begun(self, name: str) -> None:
        await self._node_of(name).begun(name)

    def pids(self, name: str) -> tuple[int, ...]:
        return self._node_of(name).pids(name)

    async def lose(self) -> None:
        for node in tuple(self._served):
            await self._silence(node)

    def _node_of(self, name: str) -> CircusSite:
        return self._nodes[self.nodes_of[name]]

    @property
    def nodes_of(self) -> dict[str, str]:
        return {name.partition("/")[2]: node for name, (node, _) in self.cluster.reserved.items()}

    async def _serve(self, node: str, order: bytes) -> None:
        assert order == node.encode()
        site = self._nodes[node]
        local = site.places
        places = NodePlaces(
            *(local.books, local.inventory, local.devices, local.watchers, local.log_file),
            plan=lambda asked: self._plans[asked.name],
        )
        service = PlacesService(places, self._tasks, _learn)
        self._served[node] = await service.serve(self.bus, SUBJECTS.node(node))

    async def _silence(self, node: str) -> None:
        # One that was lost is silent already.
        if node in self._served:
            await self._served.pop(node).unsubscribe()


async def _learn(revision: str, graph: bytes) -> None:
    pytest.fail(f"{revision} is not asked for")


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusAddress]:
    with running_nats(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture
async def site(tmp_path: Path, nats: BusAddress) -> AsyncIterator[ClusterSite]:
    tasks = TaskGuard()
    bus = await Bus.connect(nats, name="test")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        stack.push_async_callback(tasks.close)
        nodes = {}
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            nodes[name] = await stack.enter_async_context(circus_site(tmp_path / name, DEVICES // 2))
        yield ClusterSite(tmp_path / "head", nodes, bus, tasks)


class TestClusterPlaces(PlacesContract):
    pass


async def test_node_servers_stand_only_where_something_is_reserved(site: ClusterSite) -> None:
    assert site.cluster.running == set()
    reservation = await reserved(site)
    assert site.cluster.running == {reservation.node}
    await site.places.release(str(worker()))
    assert site.cluster.running == set()
    assert site.cluster.reserved == {}


async def test_a_node_that_is_silent_is_unknown_until_the_cluster_says_that_it_is_dead(site: ClusterSite) -> None:
    reservation, plan = await claimed(site)
    await site.places.start(plan)
    await site.lose()
    assert await site.places.statuses() == {plan.name: "unknown"}
    site.cluster.dead.add(reservation.node)
    site.heard.add(plan.name)
    assert await site.places.statuses() == {plan.name: "unknown"}
    with pytest.raises(SupervisorError, match="does not answer"):
        await site.places.release(plan.name)
    site.heard.clear()
    assert await site.places.statuses() == {}
    await site.books.update(lambda state: release(state, plan.watcher))
    await site.places.release(plan.name)
    assert site.cluster.reserved == {}
    assert (await reserved(site)).node != reservation.node


async def test_what_only_the_cluster_knows_is_told_as_a_reservation(site: ClusterSite) -> None:
    slot = await site.cluster.reserve(f"{NAMESPACE}/{worker()}", ONE)
    assert await site.clustered.leaks() == {str(worker())}
    assert await site.clustered.silent(await site.clustered.seen()) == {slot.node: False}
    await site.clustered.give_up(slot.node)
    (place,) = [place for place in (await site.places.places()).values() if place.reserved]
    assert set(place.reserved) == {str(worker())}
    await site.places.end(str(worker()), 1.0)
    await site.places.release(str(worker()))
    assert site.cluster.reserved == {}


async def test_node_servers_of_several_workers_are_started_together(site: ClusterSite) -> None:
    await site.clustered.prepare({worker(index): ONE for index in range(3)})
    assert site.cluster.running == {"a", "b"}
    # What is about to be reserved is no leak.
    assert await site.clustered.leaks() == set()
    assert not [place for place in (await site.places.places()).values() if place.reserved]
    found = [await reserved(site, index) for index in range(3)]
    assert sorted(one.node for one in found) == ["a", "a", "b"]
    with pytest.raises(DeviceError):
        await site.clustered.prepare({worker(index): ONE for index in range(DEVICES + 1)})


async def test_all_node_servers_end_with_the_graph(site: ClusterSite) -> None:
    for index in range(DEVICES):
        await started(site, index)
    await site.clustered.end_all()
    assert site.cluster.running == set()
    assert site.cluster.reserved == {}


async def test_reservations_of_another_graph_are_left_alone(site: ClusterSite) -> None:
    await site.cluster.reserve("other/other_VllmWorker", ONE)
    assert not [place for place in (await site.places.places()).values() if place.reserved]
    await site.clustered.end_all()
    assert set(site.cluster.reserved) == {"other/other_VllmWorker"}
