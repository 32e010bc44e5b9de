"""The story on a Ray cluster, and what only its parts can do: die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.harness.raylets import Raylets, raylet_pid, raylets
from state.machine.processes import descendants, environment_of
from state.paths import StatePaths
from tests.e2e.environments.ray_traffic import agents_of, frozen, received_from, talks_to
from tests.e2e.environments.suite import PROMPTS, WORKERS, EnvironmentServer, Suite, Told

ray = pytest.importorskip("ray")

NAMESPACE = "far"
TOKENS_IN_ALL = 10_000

_LEFT = f"""
import ray, sys
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], namespace="dynamo/{NAMESPACE}", log_to_driver=False)
print(list_named_actors(all_namespaces=True))
print([row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"])
print(ray.available_resources()["CPU"])
"""


@pytest.fixture(scope="module")
def cluster(own_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """A head without cores, and two nodes with two each."""
    with raylets(0, tmp_path_factory.mktemp("ray")) as made:
        for cpus in (0, 2, 2):
            made.add(cpus)
        yield made


@pytest.fixture(scope="module")
def where(cluster: Raylets) -> list[str]:
    return ["--environment=ray", f"--address={cluster.address}"]


@pytest.fixture(scope="module")
def server(cluster: Raylets, where: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentServer]:
    root = tmp_path_factory.mktemp("far") / "state"
    with EnvironmentServer(root, NAMESPACE, *where) as server:
        server.await_ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        server.assert_nothing_left()
    left = subprocess.run([sys.executable, "-c", _LEFT, cluster.address], capture_output=True, text=True, check=True)
    assert left.stdout.splitlines() == ["[]", "[]", "4.0"]


@pytest.fixture(scope="module")
def undisturbed(server: EnvironmentServer) -> Told:
    return server.told()


def on(server: EnvironmentServer, node: Any, of: int = WORKERS) -> list[str]:
    """The workers on a node, once there are so many in all."""
    return sorted(watcher for watcher, (_, where) in server.workers(of).items() if where == node.node_id)


def paths_of(pid: int) -> StatePaths:
    """The state folder of the node on which a process runs."""
    return StatePaths.of(NAMESPACE, environment_of(pid))


class TestRay(Suite):
    def test_workers_live_on_the_nodes(self, server: EnvironmentServer, cluster: Raylets) -> None:
        assert [len(on(server, node)) for node in cluster.nodes] == [0, 2, 2]
        assert " NODE " in server.command("ps")

    def test_workers_are_shown_with_their_nodes_and_logs(self, server: EnvironmentServer) -> None:
        watcher, (pid, node) = next(iter(server.workers(WORKERS).items()))
        assert f"on node {node}" in server.command("describe", watcher)
        with paths_of(pid).log_file(watcher).open("a") as log:
            log.write("a line of a node\n")
        assert "a line of a node" in server.command("logs", watcher)
        assert "a line of a node" in server.command("logs")

    def test_more_workers_than_the_nodes_have_devices_are_refused(self, server: EnvironmentServer) -> None:
        server.workers(WORKERS)
        with pytest.raises(AssertionError, match="takes 5 devices, and there are 4 CPU slots"):
            server.command("scale", f"VllmWorker={WORKERS + 1}")

    def test_a_worker_is_restarted_in_its_place_while_it_streams(
        self, server: EnvironmentServer, undisturbed: Told
    ) -> None:
        """No device is free for another one beside it."""
        watcher, (pid, node) = next(iter(server.workers(WORKERS).items()))
        assert server.told(lambda: server.command("restart", watcher)) == undisturbed
        after = server.workers(WORKERS)[watcher]
        assert after[0] != pid
        assert after[1] == node

    def test_ten_thousand_tokens_take_no_call_of_ray(
        self, server: EnvironmentServer, cluster: Raylets, undisturbed: Told
    ) -> None:
        """Ray's processes stand still meanwhile: whoever waited for one would wait for ever, and what is sent to one
        without waiting stays in its sockets, where it is counted."""
        each = TOKENS_IN_ALL // len(PROMPTS)
        nodes = [raylet_pid(node) for node in cluster.nodes]
        agents = {agent for node in nodes for agent in agents_of(node)}
        assert len(agents) == 2
        rays = {cluster.head_pid, *nodes, *agents}
        on_the_way = descendants(server.process.pid) | {pid for agent in agents for pid in descendants(agent)} - agents
        driver = server.state().owner.pid
        with frozen(cluster.head_pid, *nodes, *agents):
            told = server.told(tokens=each)
            assert {prompt: text[: len(undisturbed[prompt])] for prompt, text in told.items()} == undisturbed
            # The server looks after its nodes meanwhile, and waits for the answer.
            assert [pid for pid in on_the_way if talks_to({pid}, rays)] == [driver]
            assert received_from({driver}, rays) < TOKENS_IN_ALL

    def test_streams_are_whole_when_an_agent_is_killed(
        self, server: EnvironmentServer, cluster: Raylets, undisturbed: Told
    ) -> None:
        (agent,) = agents_of(raylet_pid(cluster.nodes[2]))
        assert server.told(lambda: os.kill(agent, signal.SIGKILL)) == undisturbed
        server.workers(WORKERS)

    def test_streams_are_whole_when_a_raylet_is_killed_and_one_that_joins_is_used(
        self, server: EnvironmentServer, cluster: Raylets, undisturbed: Told
    ) -> None:
        assert server.told(lambda: cluster.kill(cluster.nodes[2])) == undisturbed
        server.workers(WORKERS - 2)
        joined = cluster.add(2)
        assert len(on(server, joined)) == 2

    def test_the_head_of_the_cluster_may_die_and_start_again(
        self, server: EnvironmentServer, cluster: Raylets, undisturbed: Told
    ) -> None:
        assert server.told(cluster.kill_head) == undisturbed
        cluster.start_head()
        server.command("scale", "VllmWorker=3")
        server.command("scale", f"VllmWorker={WORKERS}")
        server.workers(WORKERS)
