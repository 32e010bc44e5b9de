"""A node server as a process: what it answers, and when it ends by itself, with all that it has started."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import SilentNodeError
from dynamo_local.core.names import FIRST_OF_MAIN, Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.graph import load_graph
from dynamo_local.supervisor.node.head import NodeOrder, beat, installed_versions
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.port import Need
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.machine.processes import ProcFs
from state.paths import StatePaths
from state.statefile.leftovers import leftovers
from state.statefile.store import StateStore
from tests.integration.nats_process import running_nats

pytestmark = pytest.mark.integration

NAMESPACE = "noded"
SUBJECTS = Subjects(NAMESPACE)
GRAPH = resolve(load_graph("tests.integration.supervisor.idle_graph:Front"), None, (), NAMESPACE)
WATCHER = Watcher(NAMESPACE, "Idle", 1)
PATIENCE_S = 60.0


class Node:
    """A node server, which is a child of the test."""

    def __init__(self, root: Path, bus: Bus) -> None:
        self.paths = StatePaths(root / "state", NAMESPACE)
        self.places = FarPlaces(bus, SUBJECTS.node("n1"), "node n1")
        self.errors = root / "errors"
        self.process: asyncio.subprocess.Process

    async def start(self, order: NodeOrder, *options: str) -> bytes:
        """Start it, and return its first line."""
        command = (sys.executable, "-m", "dynamo_local.supervisor.node", f"--state-dir={self.paths.root}", *options)
        with self.errors.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order.encode())
        self.process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.stdout.readline()

    async def run_a_worker(self) -> int:
        """Have a worker run. Returns its pid once it has registered."""
        reservation = await self.places.reserve(WATCHER, Need("decode", 1, revision=FIRST_OF_MAIN))
        await self.places.learn(FIRST_OF_MAIN, GRAPH.to_json())
        plan = WatcherPlan(WATCHER, "decode", (), devices=reservation.devices, revision=FIRST_OF_MAIN)
        await self.places.start(plan)
        store = StateStore(self.paths)
        await eventually(lambda: store.read().components[str(WATCHER)].pid is not None)
        pid = store.read().components[str(WATCHER)].pid
        assert pid is not None
        return pid

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            code = await self.process.wait()
        await eventually(lambda: leftovers(self.paths, ProcFs().snapshot()) == ())
        return code


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # files and processes give no event


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusAddress]:
    with running_nats(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture
async def bus(nats: BusAddress) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats, name="test")
    yield bus
    await bus.close()


@pytest.fixture
async def node(tmp_path: Path, bus: Bus) -> AsyncIterator[Node]:
    node = Node(tmp_path, bus)
    yield node
    with suppress(ProcessLookupError):
        node.process.kill()
    await node.process.wait()


@pytest.fixture
def order(nats: BusAddress) -> NodeOrder:
    return NodeOrder(NAMESPACE, "n1", "head", nats, GRAPH, installed_versions(), 2, PATIENCE_S, 10.0)


async def test_a_node_server_runs_workers_and_leaves_nothing(node: Node, order: NodeOrder) -> None:
    assert await node.start(order) == b"ready\n"
    assert node.paths.bus_file.stat().st_mode & 0o777 == 0o600
    await node.run_a_worker()
    assert await node.places.statuses() == {str(WATCHER): "active"}
    await node.places.end(str(WATCHER), PATIENCE_S)
    await node.places.release(str(WATCHER))
    assert await node.places.statuses() == {}
    await node.run_a_worker()
    node.process.terminate()
    assert await node.ended() == 0
    assert {path.name for path in node.paths.root.iterdir()} == {node.paths.logs_dir.name}
    with pytest.raises(SilentNodeError):
        await node.places.statuses()


async def test_it_ends_with_the_process_that_it_watches(node: Node, order: NodeOrder) -> None:
    watched = await asyncio.create_subprocess_exec("sleep", "600")
    assert await node.start(order, f"--watch-pid={watched.pid}") == b"ready\n"
    await node.run_a_worker()
    watched.kill()
    await node.ended()
    await watched.wait()


async def test_it_ends_when_another_server_has_its_namespace(node: Node, order: NodeOrder, bus: Bus) -> None:
    assert await node.start(order) == b"ready\n"
    await node.run_a_worker()
    beats = asyncio.create_task(beat(bus, SUBJECTS, "another"))
    await node.ended()
    beats.cancel()
    assert "another server has taken the place" in node.errors.read_text()


async def test_its_workers_die_with_it_and_the_next_one_clears_what_is_left(node: Node, order: NodeOrder) -> None:
    assert await node.start(order) == b"ready\n"
    await node.run_a_worker()
    node.process.send_signal(signal.SIGKILL)
    await node.ended()
    assert await node.start(order) == b"ready\n"
    assert await node.places.statuses() == {}
    node.process.terminate()
    assert await node.ended() == 0


async def test_other_versions_are_refused_in_one_line(node: Node, order: NodeOrder) -> None:
    other = msgspec.structs.replace(order, versions={"dynamo-local": "0.0.0"})
    assert await node.start(other) == b""
    assert await node.process.wait() == 2
    (line,) = node.errors.read_text().splitlines()
    assert line.startswith("error: dynamo-local ")
    assert not node.paths.root.exists()


async def test_an_unreachable_bus_is_told_in_one_line(node: Node, order: NodeOrder) -> None:
    nowhere = msgspec.structs.replace(order, bus=BusAddress("nats://127.0.0.1:1"))
    assert await node.start(nowhere) == b""
    assert await node.ended() == 1
    assert "error: cannot connect to NATS" in node.errors.read_text().splitlines()[-1]
