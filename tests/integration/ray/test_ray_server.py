"""A graph of mockers on a Ray cluster: what kills nodes and agents leaves streams whole; commands work as on one
machine; nothing is left in the cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.bus.nats import BusAddress
from tests.integration.ray.raylets import Raylets, raylet_pid, raylets, until
from tests.integration.ray.streams import streamed
from tests.integration.server_process import PATIENCE_S, ServerProcess

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration

NAMESPACE = "far"
WORKERS = 4


class RayServer(ServerProcess):
    """Four workers where the cluster has them."""

    def __init__(self, root: Path, address: str, *options: str) -> None:
        graph = ["tests.integration.ray.far_graph:Front", f"--VllmWorker.ServiceArgs.workers={WORKERS}"]
        engine = ["--VllmWorker.engine=mocker", "--VllmWorker.mocker-step-base-ms=20"]
        where = [f"--namespace={NAMESPACE}", "--port=0", "--environment=ray", f"--address={address}"]
        super().__init__(root, NAMESPACE, ["-m", "dynamo_local.cli.main", "serve", *graph, *where, *engine, *options])

    def command(self, *words: str) -> str:
        """What a command says that succeeds."""
        done = subprocess.run(
            [sys.executable, "-m", "dynamo_local.cli.main", *words, f"--namespace={NAMESPACE}"],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def nodes(self) -> dict[str, str]:
        """Nodes of the workers that are ready, by watcher."""
        rows = json.loads(self.command("ps", "--json"))
        return {row["watcher"]: row["node"] for row in rows if "Worker" in row["watcher"] and row["state"] == "ready"}

    def on(self, node: Any) -> list[str]:
        """The workers that are ready on a node."""
        return sorted(watcher for watcher, where in self.nodes().items() if where == node.node_id)

    def streams(self, what: str, disturb: Callable[[], object]) -> None:
        """Check that streams are whole whatever is done meanwhile."""
        address = BusAddress.load(self.paths.bus_file)
        print(f"{what}: a stream waited {asyncio.run(streamed(address, NAMESPACE, disturb)):.2f} s at most")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """A head without cores, and two nodes with two each."""
    with raylets(0, tmp_path_factory.mktemp("ray")) as made:
        for cpus in (0, 2, 2):
            made.add(cpus)
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cluster: Raylets) -> Iterator[RayServer]:
    with RayServer(tmp_path_factory.mktemp("state"), cluster.address) as server:
        server.await_start()
        yield server


def test_workers_live_on_the_nodes(server: RayServer, cluster: Raylets) -> None:
    assert [len(server.on(node)) for node in cluster.nodes] == [0, 2, 2]


def test_no_process_that_requests_go_through_has_ray_in_it(server: RayServer) -> None:
    """So no token takes a call of Ray."""
    loaded = [one for one in server.processes() if "_raylet" in Path(f"/proc/{one.pid}/maps").read_text()]
    assert loaded == []


def test_streams_are_whole_when_an_agent_is_killed(server: RayServer, cluster: Raylets) -> None:
    (agent,) = agents_of(raylet_pid(cluster.nodes[2]))
    server.streams("an agent killed", lambda: os.kill(agent, signal.SIGKILL))
    until(lambda: len(server.nodes()) == WORKERS)


def test_streams_are_whole_when_a_raylet_is_killed_and_one_that_joins_is_used(
    server: RayServer, cluster: Raylets
) -> None:
    server.streams("a raylet killed", lambda: cluster.kill(cluster.nodes[2]))
    until(lambda: len(server.nodes()) == WORKERS - 2)
    began = time.monotonic()
    joined = cluster.add(2)
    until(lambda: len(server.on(joined)) > 0)
    print(f"a raylet that joined had a worker {time.monotonic() - began:.2f} s after its launch")
    until(lambda: len(server.on(joined)) == 2)


def test_requests_leave_a_worker_that_is_drained(server: RayServer, cluster: Raylets) -> None:
    drained = server.on(cluster.nodes[1])[0]
    server.streams("a drain", lambda: server.command("drain", drained))
    assert drained not in server.nodes()


def test_workers_are_scaled(server: RayServer) -> None:
    server.command("scale", "VllmWorker=2")
    assert len(server.nodes()) == 2
    server.command("scale", "VllmWorker=4")
    assert len(server.nodes()) == 4


def test_the_head_of_the_cluster_may_die_and_start_again(server: RayServer, cluster: Raylets) -> None:
    server.streams("the head killed", cluster.kill_head)
    cluster.start_head()
    server.command("scale", "VllmWorker=3")
    server.command("scale", "VllmWorker=4")
    assert len(server.nodes()) == WORKERS


def test_a_stop_leaves_nothing_in_the_cluster(server: RayServer, cluster: Raylets) -> None:
    server.signal(signal.SIGTERM)
    assert server.end() == 0, server.output
    script = f"""
import ray
from ray.util import list_named_actors, placement_group_table
ray.init(address={cluster.address!r}, namespace="dynamo/{NAMESPACE}", log_to_driver=False)
print(list_named_actors(all_namespaces=True))
print([row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"])
print(ray.available_resources()["CPU"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "4.0"]


def agents_of(raylet: int) -> list[int]:
    """The actors of that raylet that are agents."""
    children = [path for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == raylet]
    pids = [int(path.parent.name) for path in children]
    return [pid for pid in pids if b"NodeAgent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
