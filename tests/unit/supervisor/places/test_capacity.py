"""What is left of devices for workers that are to start: of a machine, and of the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DeviceError
from dynamo_local.core.names import Watcher
from dynamo_local.core.shares import on_node
from dynamo_local.supervisor.places.capacity import (
    Capacity,
    ClusterCapacity,
    MachineCapacity,
    MachineFacts,
    NodeCapacity,
    Startable,
    capacity_of_nodes,
    device_count,
    kind_of,
    left_of,
)
from dynamo_local.supervisor.places.cluster import ClusterNode
from state.devices.allocation import cpu_slots
from state.statefile.model import State
from state.statefile.transitions import add_template, claim, release, retire
from tests.places_contract import NAMESPACE, ONE, worker
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.actuator.fake_ports import template
from tests.unit.supervisor.places.cluster_site import ClusterInMemory

REVISION = "chat@1"


def state_with(*claims: tuple[str, tuple[int, ...], float]) -> State:
    """Workers of an endpoint, each with its node, its devices there and its share of them."""
    first = Watcher(NAMESPACE, "VllmWorker", 0, REVISION)
    state = add_template(empty_state(), first, "aggregated")
    for index, (node, devices, share) in enumerate(claims):
        watcher = replace(first, index=index)
        state = claim(state, watcher, role="aggregated", cmd="run", devices=devices, share=share, node=node)
    return state


def nodes_of(rooms: Mapping[str, NodeCapacity], own: float = 0) -> ClusterCapacity:
    return ClusterCapacity("cpu-slot", lambda: rooms, own)


def wanted(state: State, devices: Capacity, number: int, size: int = 1) -> Startable:
    return devices.startable(state, [template("VllmWorker", "aggregated", size, REVISION)] * number)


@given(st.integers(0, 8), st.integers(0, 8), st.floats(0, 8), st.booleans())
def test_what_is_left_is_what_nobody_holds(size: int, held: int, others: float, virtual: bool) -> None:
    held = min(size, held)
    left = left_of(NodeCapacity(size, others), [((number + 3,), 1.0) for number in range(held)], virtual=virtual)
    assert len(left) == size
    assert all(left[number + 3] == 0 for number in range(held))
    assert sum(left.values()) == pytest.approx(max(0.0, size - held - (0 if virtual else others)), abs=1e-4)


def test_workers_are_counted_on_all_nodes() -> None:
    devices = nodes_of({"a": NodeCapacity(2), "b": NodeCapacity(2, others=1)})
    state = state_with(("a", (0,), 1.0))
    assert wanted(state, devices, 2) == Startable(2)
    three = wanted(state, devices, 3)
    assert (three.workers, three.shortage) == (
        2,
        "VllmWorker needs 1 CPU slot on one node of the cluster, and none has them free",
    )


def test_what_others_hold_is_waited_for_and_no_reason_to_refuse() -> None:
    assert nodes_of({"a": NodeCapacity(2), "b": NodeCapacity(2, others=1)}).total() == 4
    assert nodes_of({"a": NodeCapacity(2), "b": NodeCapacity(2, others=1)}, own=1).total() == 3


def test_devices_of_one_worker_are_on_one_node() -> None:
    devices = nodes_of({"a": NodeCapacity(2), "b": NodeCapacity(2)})
    assert wanted(state_with(), devices, 3, size=2).workers == 2
    assert wanted(state_with(("a", (0,), 1.0)), devices, 2, size=2).workers == 1
    assert wanted(state_with(), devices, 1, size=3).workers == 0
    with pytest.raises(DeviceError, match="chat needs 3 CPU slots on one node of the cluster"):
        devices.require(state_with(), "chat", 3, virtual=False)
    devices.require(state_with(), "chat", 2, virtual=False)


def test_mockers_share_devices_with_others() -> None:
    devices = nodes_of({"a": NodeCapacity(1, others=1)})
    devices.require(state_with(), "chat", 1, virtual=True)
    with pytest.raises(DeviceError, match="on one node of the cluster"):
        devices.require(state_with(), "chat", 1, virtual=False)


def test_a_machine_has_what_is_neither_taken_nor_gone() -> None:
    slots, gone = cpu_slots([0], 3), {2: "offline"}
    devices = MachineCapacity(slots, MachineFacts(gone=lambda _: gone))
    state = claim(
        empty_state(), Watcher(NAMESPACE, "VllmWorker"), role="aggregated", cmd="run", devices=(0,), share=0.5
    )
    assert devices.left(state) == {0: 0.5, 1: 1.0}
    assert (devices.total(), devices.ids(state.components["dynamo_VllmWorker"])) == (3, (0,))
    two = wanted(state, devices, 2)
    assert two.workers == 1
    assert "VllmWorker needs 1 device, 0 of 3 CPU slots are free; CPU slot 2 is gone (offline)" in two.shortage
    # One of those that stay would do for one worker, whoever ends, and not for one of this size.
    assert two.gone == ""
    assert "VllmWorker needs 3 devices" in wanted(state, devices, 1, size=3).gone
    with pytest.raises(DeviceError, match="chat needs 2 devices, 1 of 3 CPU slots is free"):
        devices.require(state, "chat", 2, virtual=False)
    worker = state_with(("local", (0, 2), 1.0)).components["dynamo_chat@1_VllmWorker"]
    assert (devices.why_off(None), devices.why_off(worker)) == ("", "CPU slot 2 is gone (offline)")


def test_ids_stay_the_same_when_nodes_come_and_go() -> None:
    rooms = {"b": NodeCapacity(2)}
    devices = nodes_of(rooms)
    state = state_with(("b", (1,), 0.5), ("a", (0,), 1.0))
    on_b, on_a = (entry for entry in state.components.values() if entry.holds)
    before = devices.ids(on_b)
    assert [devices.free(state)[device] for device in before] == [0.5]
    # What a node that is gone has had is nowhere.
    assert devices.ids(on_a) == ()
    rooms["a"] = NodeCapacity(1)
    assert devices.ids(on_b) == before
    assert devices.free(state)[devices.ids(on_a)[0]] == 0
    del rooms["b"]
    assert devices.ids(on_b) == ()
    assert len(devices.free(state)) == 1


def test_devices_know_their_node_and_those_of_a_node_that_runs_nothing_are_not_free() -> None:
    rooms = {"a": NodeCapacity(1), "b": NodeCapacity(2)}
    devices = nodes_of(rooms)
    assert [devices.node(device) for device in devices.free(state_with())] == ["a", "b", "b"]
    rooms["a"] = NodeCapacity(1, is_failing=True)
    assert [devices.node(device) for device in devices.free(state_with())] == ["b", "b"]
    # If there is no other, it is tried there again.
    assert wanted(state_with(), devices, 3) == Startable(3)


def test_nodes_that_several_threads_see_first_have_ids_of_their_own() -> None:
    both = Barrier(2, timeout=60)

    class Slow(dict[str, int]):
        """Both threads look before one of them writes."""

        def setdefault(self, node: str, number: int = 0) -> int:
            both.wait()
            return super().setdefault(node, number)

    devices = nodes_of({"a": NodeCapacity(1), "b": NodeCapacity(1)})
    devices._numbers = Slow()
    entries = [entry for entry in state_with(("a", (0,), 1.0), ("b", (0,), 1.0)).components.values() if entry.holds]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(devices.ids, entries)
    assert first != second


def test_a_node_may_join_while_that_of_a_device_is_looked_for() -> None:
    class Slow(int):
        """Another thread numbers a node meanwhile."""

        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            devices._numbers["joins"] = 7
            return int(self) == other

    devices = nodes_of({})
    devices._numbers |= {"a": Slow(0), "b": 1}
    assert devices.node(on_node(1, [0])[0]) == "b"


def test_what_others_hold_is_what_is_neither_free_nor_ours() -> None:
    nodes = {
        "a": ClusterNode("a", is_alive=True, devices=4, free=1.5),
        "b": ClusterNode("b", is_alive=False, devices=4, free=4),
    }
    rooms = capacity_of_nodes(nodes, state_with(("a", (0,), 1.0), ("b", (0,), 1.0)))
    assert rooms == {"a": NodeCapacity(4, 1.5)}
    assert device_count(rooms.values()) == 2.5


def test_the_kind_of_devices_is_that_of_nodes_that_live() -> None:
    gpus = ClusterNode("a", is_alive=True, devices=1, free=1, kind="gpu")
    assert kind_of([gpus], "cpu-slot") == "gpu"
    assert kind_of([replace(gpus, is_alive=False)], "cpu-slot") == "cpu-slot"
    assert kind_of([replace(gpus, kind=None)], "cpu-slot") == "cpu-slot"


# Devices of nodes that others hold, as the cluster's count is late and the graph's books change.


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
