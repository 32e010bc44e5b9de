"""Ray as a cluster of nodes: reservations and node servers, on real raylets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.errors import DeviceError, NamespaceBusyError, SupervisorError, UsageError
from dynamo_local.core.process.ownership import Owner
from dynamo_local.supervisor.places.port import Need
from dynamo_local.supervisor.server.ownership import ClusterRecord, Ownership
from tests.integration.ray.raylets import Raylets, raylet_pid, raylets, runs, until
from tests.unit.supervisor.recording import RecordingReport

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration

ONE = Need("decode", 1)
STAND_IN = (str(Path(__file__).with_name("stand_in.py")),)


@pytest.fixture(scope="module")
def cluster_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    with raylets(2, tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture(scope="module")
def connection(cluster_of_two: Raylets) -> Iterator[Any]:
    """The connection that all tests share: a process joins one cluster at a time."""
    from dynamo_local.ray.cluster import RayCluster

    cluster = asyncio.run(RayCluster.connect("test", cluster_of_two.address))
    cluster.program = STAND_IN
    yield cluster
    asyncio.run(cluster.close())


@pytest.fixture
async def cluster(connection: Any) -> AsyncIterator[Any]:
    """The connection, with nothing reserved; and nothing is left by the test."""
    yield connection
    for name in await connection.reservations():
        await connection.release(name)
    for node in await connection.nodes():
        await connection.end_node(node)


def facts_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


async def free_in_the_end(cluster: Any, expected: list[float]) -> bool:
    """Whether so many devices are free on the nodes, once Ray has counted: it does so a moment after a change."""
    found: list[float] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while found != expected:
                found = sorted(node.free for node in (await cluster.nodes()).values())
                await asyncio.sleep(0.05)
    return found == expected


async def test_nodes_are_known_by_their_ids_with_their_cores(cluster: Any, cluster_of_two: Raylets) -> None:
    assert await free_in_the_end(cluster, [2, 2])
    nodes = await cluster.nodes()
    assert set(nodes) == {node.node_id for node in cluster_of_two.nodes}
    assert {(node.is_alive, node.devices) for node in nodes.values()} == {(True, 2)}
    assert all(node.labels["ray.io/node-id"] == name for name, node in nodes.items())


async def test_what_is_reserved_is_nobody_elses_until_it_is_released(cluster: Any) -> None:
    slots = [await cluster.reserve(f"test/w{number}", ONE) for number in range(4)]
    assert not any(slot.devices for slot in slots), "Ray says which when the process starts"
    assert await free_in_the_end(cluster, [0, 0])
    with pytest.raises(DeviceError, match=r"missing are 1 on \w{8} \(0 free\), 1 on \w{8}"):
        await cluster.reserve("test/w4", ONE)
    assert await cluster.reservations() == {f"test/w{number}": slot for number, slot in enumerate(slots)}
    await cluster.release("test/w2")
    await cluster.release("test/w2")
    assert await cluster.reserve("test/w4", ONE) == slots[2]


async def test_a_node_that_is_decided_is_the_only_one_and_one_to_avoid_comes_last(cluster: Any) -> None:
    first, second = await cluster.nodes()
    need = Need("decode", 1, node=second)
    assert {(await cluster.reserve(f"test/w{number}", need)).node for number in range(2)} == {second}
    with pytest.raises(DeviceError, match="on one node"):
        await cluster.reserve("test/w2", need)
    assert await free_in_the_end(cluster, [0, 2])
    await cluster.release("test/w1")
    assert await free_in_the_end(cluster, [1, 2])
    # It would be the fullest that has room.
    assert (await cluster.reserve("test/w3", ONE, (second,))).node == first
    assert (await cluster.reserve("test/w4", ONE, (first,))).node == second


async def test_a_name_is_reserved_once(cluster: Any) -> None:
    first = await cluster.reserve("test/w", ONE)
    assert await cluster.reserve("test/w", ONE) == first
    assert await free_in_the_end(cluster, [1, 2])


async def test_devices_of_a_process_are_on_one_node_and_shares_on_the_fullest(cluster: Any) -> None:
    half = await cluster.reserve("test/half", Need("decode", 1, 0.5))
    assert (await cluster.reserve("test/other", Need("decode", 1, 0.5))).node == half.node
    both = await cluster.reserve("test/both", Need("decode", 2))
    assert both.node != half.node
    with pytest.raises(DeviceError):
        await cluster.reserve("test/more", Need("decode", 2))
    assert set(await cluster.reservations()) == {"test/half", "test/other", "test/both"}


async def test_virtual_workers_take_nothing_from_others_and_have_a_slot_each(cluster: Any) -> None:
    virtual = Need("decode", 1, virtual=True)
    nodes = [(await cluster.reserve(f"test/v{number}", virtual)).node for number in range(4)]
    assert sorted(map(nodes.count, set(nodes))) == [2, 2]
    with pytest.raises(DeviceError):
        await cluster.reserve("test/v4", virtual)
    assert ray.available_resources()["CPU"] == 4


async def test_a_second_head_is_refused_while_the_first_one_owns_the_namespace(cluster: Any) -> None:
    assert await cluster.add_note("note", b"")
    assert not await cluster.add_note("note", b"another")
    assert await cluster.notes() == {"note": b""}
    await cluster.remove_note("note")
    await cluster.remove_note("note")
    record, report = ClusterRecord(cluster), RecordingReport()
    first, second = (Ownership("test", Owner(host, host, host), report, renew_every_s=0.1) for host in "ab")
    await first.confirm(record)
    keeping = asyncio.create_task(first.keep(record))
    with pytest.raises(NamespaceBusyError, match="belongs to a server on a"):
        await second.confirm(record)
    assert len(await cluster.notes()) == 1
    keeping.cancel()
    await first.release(record)
    await second.confirm(record)
    assert (await record.read()).owner == Owner("b", "b", "b")


async def test_what_a_crash_left_unfinished_is_removed(cluster: Any) -> None:
    from ray.util.placement_group import placement_group, placement_group_table

    placement_group([{"CPU": 100}], name="dynamo/test/leaked", lifetime="detached")
    strangers = placement_group([{"CPU": 100}], name="dynamo/other/leaked", lifetime="detached")
    assert await cluster.reservations() == {}
    left = {row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"}
    assert left == {"dynamo/other/leaked"}
    ray.util.remove_placement_group(strangers)


def may_take_priority() -> bool:
    """Whether processes of this user may give themselves more priority."""
    take = "import os; os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))"
    return subprocess.run(["nice", "-n", "1", sys.executable, "-c", take], capture_output=True).returncode == 0


async def test_a_node_server_runs_once_and_ends_with_its_agent(
    cluster: Any, cluster_of_two: Raylets, tmp_path: Path
) -> None:
    node, file = next(iter(await cluster.nodes())), tmp_path / "facts"
    await cluster.start_node(node, str(file).encode())
    first = facts_in(file)
    assert not [name for name in first["environment"] if name.startswith(("RAY_", "OMP_", "CUDA_"))]
    assert first["arguments"][0] == "--watch-pid"
    raylet = int(first["arguments"][1])
    assert raylet in {raylet_pid(one) for one in cluster_of_two.nodes}
    # Ray gives its workers less priority.
    assert first["niceness"] == os.getpriority(os.PRIO_PROCESS, raylet) or not may_take_priority()
    await cluster.start_node(node, str(file).encode())
    assert facts_in(file) == first
    os.kill(first["agent"], signal.SIGKILL)
    until(lambda: not runs(first["pid"]))
    await cluster.start_node(node, str(file).encode())
    second = facts_in(file)
    assert second["pid"] != first["pid"]
    await cluster.end_node(node)
    assert not runs(second["pid"])
    until(lambda: not runs(second["agent"]))
    assert ray.util.list_named_actors() == []
    await cluster.end_node(node)


async def test_an_agent_ends_with_its_node_server(cluster: Any, tmp_path: Path) -> None:
    node, file = next(iter(await cluster.nodes())), tmp_path / "facts"
    await cluster.start_node(node, str(file).encode())
    os.kill(facts_in(file)["pid"], signal.SIGTERM)
    until(lambda: ray.util.list_named_actors() == [])


async def test_a_node_server_that_cannot_start_says_why_and_leaves_nothing(cluster: Any) -> None:
    node = next(iter(await cluster.nodes()))
    with pytest.raises(SupervisorError, match="NATS cannot be reached; check the address") as caught:
        await cluster.start_node(node, b"")
    assert "\n" not in str(caught.value)
    assert ray.util.list_named_actors() == []


async def test_gpus_are_reserved_by_their_ids(cluster: Any, cluster_of_two: Raylets) -> None:
    node = cluster_of_two.add(gpus=2)
    halves = [await cluster.reserve(f"test/half{number}", Need("decode", 1, 0.5)) for number in range(2)]
    whole = await cluster.reserve("test/whole", ONE)
    assert {slot.node for slot in (*halves, whole)} == {node.node_id}
    assert halves[0].devices == halves[1].devices
    assert sorted((*halves[0].devices, *whole.devices)) == [0, 1]
    with pytest.raises(DeviceError):
        await cluster.reserve("test/more", ONE)
    cluster.groups._devices.clear()
    assert (await cluster.reservations())["test/whole"] == whole
    assert ray.available_resources().get("GPU", 0) == 0
    await cluster.release("test/whole")
    assert await cluster.reserve("test/whole", ONE) == whole
    cluster_of_two.kill(node)


async def test_a_node_that_dies_takes_its_reservations_and_its_node_server(
    cluster: Any, cluster_of_two: Raylets, tmp_path: Path
) -> None:
    node, file = cluster_of_two.add(cpus=3), tmp_path / "facts"
    assert (await cluster.reserve("test/big", Need("decode", 3))).node == node.node_id
    await cluster.start_node(node.node_id, str(file).encode())
    cluster_of_two.kill(node)
    async with asyncio.timeout(60):
        while (await cluster.nodes())[node.node_id].is_alive:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # Ray tells when it is asked
    assert await cluster.reservations() == {}
    until(lambda: not runs(facts_in(file)["pid"]))
    with pytest.raises(SupervisorError, match="left the Ray cluster"):
        await cluster.start_node(node.node_id, str(file).encode())
    await cluster.end_node(node.node_id)


def connecting(address: str, *, version: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process that connects, of another version of Ray, and is then told to end."""
    script = f"""
import asyncio, os, ray, signal
from dynamo_local.core.errors import UsageError
from dynamo_local.ray.cluster import RayCluster
ray.__version__ = {version!r} or ray.__version__
async def connect():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await RayCluster.connect("test", {address!r})
    os.kill(os.getpid(), signal.SIGTERM)
    await told.wait()
    print("told to end")
try:
    asyncio.run(connect())
except UsageError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)


def test_a_process_that_has_joined_takes_sigterm_as_before(cluster_of_two: Raylets) -> None:
    outcome = connecting(cluster_of_two.address)
    assert outcome.stdout == "told to end\n"
    assert "SIGTERM" not in outcome.stderr


def test_another_version_of_ray_is_refused_in_one_line(cluster_of_two: Raylets) -> None:
    said = connecting(cluster_of_two.address, version="2.59.0").stdout
    assert "2.59.0" in said
    assert said.endswith("; install the same Ray and Python on all nodes\n")
    assert said.count("\n") == 1


async def test_where_no_cluster_is_none_is_started() -> None:
    from dynamo_local.ray.cluster import RayCluster

    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.2:1 can be joined.*ray start --head"):
        await RayCluster.connect("test", "127.0.0.2:1")
    with pytest.raises(UsageError, match="client"):
        await RayCluster.connect("test", "ray://127.0.0.2:10001")
