"""Which node a reservation is made on."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from dynamo_local.core.errors import DeviceError
from dynamo_local.ray.placing import Group, RayNode, bundle_of, choose, counted, resource_of
from dynamo_local.supervisor.places.port import Need

MINE = "dynamo/mine/"
ONE = Need("decode", 1)
HALF = Need("decode", 1, 0.5)
VIRTUAL = Need("decode", 1, virtual=True)


def node(name: str, cpus: float = 4, gpus: float = 0, *, alive: bool = True, available: float | None = None) -> RayNode:
    total = {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})
    free = dict(total) if available is None else {**total, resource_of([RayNode(name, True, total, {}, {})]): available}
    return RayNode(name, alive, total, free, {})


def group(where: str, need: Need = ONE, *, of: str = MINE, resource: str = "CPU") -> Group:
    return Group(f"{of}w", where, bundle_of(need, resource))


def chosen(nodes: list[RayNode], groups: list[Group], need: Need = ONE, avoid: Collection[str] = ()) -> list[str]:
    return choose(counted(nodes, groups, MINE), groups, MINE, need, avoid)


def test_gpus_are_counted_where_a_node_that_lives_has_one() -> None:
    nodes = [node("a"), node("b", gpus=2), node("c", gpus=8, alive=False)]
    found = counted(nodes, [], MINE)
    assert {name: one.devices for name, one in found.items()} == {"a": 0, "b": 2, "c": 0}
    assert {one.kind for one in found.values()} == {"gpu"}
    assert counted(nodes[::2], [], MINE)["a"].kind == "cpu-slot"
    assert {name: one.devices for name, one in counted(nodes[::2], [], MINE).items()} == {"a": 4, "c": 0}


def test_what_is_free_is_neither_reserved_nor_used_by_anybody() -> None:
    groups = [group("a"), group("a", of="dynamo/other/"), group("b", Need("decode", 2)), group("")]
    found = counted([node("a"), node("b", available=1)], groups, MINE)
    assert {name: one.free for name, one in found.items()} == {"a": 2, "b": 1}


def test_a_virtual_worker_takes_a_slot_of_its_graph_alone() -> None:
    mine, others = group("a", VIRTUAL), group("a", VIRTUAL, of="dynamo/other/")
    assert "CPU" not in mine.bundle
    assert mine.devices == 1
    assert counted([node("a", 1)], [others], MINE)["a"].free == 1
    assert counted([node("a", 1)], [mine], MINE)["a"].free == 0
    assert chosen([node("a", 1, available=0)], [others], VIRTUAL) == ["a"]
    with pytest.raises(DeviceError):
        chosen([node("a", 1)], [mine], VIRTUAL)


def test_nodes_of_the_graph_come_first_then_those_with_the_least_room_that_is_enough() -> None:
    nodes = [node("a", 8), node("b", 2), node("c", 4), node("d", 1, alive=False)]
    assert chosen(nodes, []) == ["b", "c", "a"]
    assert chosen(nodes, [group("a")]) == ["a", "b", "c"]
    assert chosen(nodes, [group("a")], Need("decode", 3)) == ["a", "c"]
    assert chosen(nodes, [group("c", HALF)], HALF) == ["c", "b", "a"]


def test_nodes_in_trouble_come_last() -> None:
    nodes = [node("a", 8), node("b", 2), node("c", 4)]
    assert chosen(nodes, [group("a")], avoid={"a", "b"}) == ["c", "a", "b"]
    assert chosen(nodes, [group("a")], avoid={"a", "b", "c"}) == ["a", "b", "c"]


def test_a_node_that_is_decided_is_the_only_one() -> None:
    nodes = [node("a", 8), node("b", 2), node("c", alive=False)]
    assert chosen(nodes, [group("a")], Need("decode", 2, node="b"), avoid={"b"}) == ["b"]
    with pytest.raises(DeviceError, match=r"on one node of the Ray cluster; missing are 1 on b \(2 free\)"):
        chosen(nodes, [], Need("decode", 3, node="b"))
    for gone in ("c", "d"):
        with pytest.raises(DeviceError, match=f"node {gone} is not alive in the Ray cluster"):
            chosen(nodes, [], Need("decode", 1, node=gone))


def test_the_error_tells_how_many_are_missing_where() -> None:
    nodes = [node("a" * 12, 8, available=1), node("b" * 12, 2)]
    with pytest.raises(DeviceError, match=r"missing are 2 on bbbbbbbb \(2 free\), 3 on aaaaaaaa \(1 free\);"):
        chosen(nodes, [], Need("decode", 4))
    with pytest.raises(DeviceError, match="no node that is alive"):
        chosen([node("a", alive=False)], [])
