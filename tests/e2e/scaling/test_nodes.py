"""Workers on two nodes of a cluster, whose node servers are killed and whose workers come and go, seen by clients.

The nodes are child processes with state folders of their own; the engines are mockers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from state.machine.processes import ProcFs
from state.paths import StatePaths
from state.statefile.reconcile import leftovers
from tests.child_nodes import node_root, pid_file
from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.e2e.streams import streamed_text
from tests.integration.server_process import eventually

NAMESPACE = "nodes"
NODES = ("a", "b")
TOKENS = 300
PROMPTS = [f"story number {number}: " for number in range(8)]


class NodesServer(LlmServer):
    def __init__(self, root: Path) -> None:
        options = [
            "examples.llm.graphs.agg_router:Frontend",
            "--environment=tests.child_nodes:ChildNodes",
            "--address=a=2,b=2",
            "--Frontend.model=random",
            "--VllmWorker.engine=mocker",
            "--VllmWorker.mocker-step-base-ms=30",
            "--VllmWorker.ServiceArgs.workers=2",
        ]
        super().__init__(root, NAMESPACE, options)

    def node_pid(self, node: str) -> int:
        return int(pid_file(self.paths.root, node).read_text())

    def paths_of(self, node: str) -> StatePaths:
        return StatePaths(node_root(self.paths.root, node) / "state", NAMESPACE)

    def nodes_of_workers(self) -> dict[str, str]:
        """Nodes of the workers that are ready."""
        rows = [row for row in self.ps() if row["component"] == "VllmWorker" and row["state"] == "ready"]
        return {row["watcher"]: row["node"] for row in rows}

    def assert_nodes_left_nothing(self) -> None:
        for node in NODES:
            paths = self.paths_of(node)
            assert leftovers(paths, ProcFs().snapshot()) == ()
            if paths.root.exists():
                assert {path.name for path in paths.root.iterdir()} == {paths.logs_dir.name}


@pytest.fixture(scope="module")
def nodes(own_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesServer]:
    with NodesServer(tmp_path_factory.mktemp("nodes") / "head") as server:
        server.await_ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        server.assert_nothing_left()
        server.assert_nodes_left_nothing()


@pytest.fixture(scope="module")
def client(nodes: NodesServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{nodes.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        told = {prompt: begin(pool, client, prompt)[0] for prompt in PROMPTS}
        return {prompt: stream.result() for prompt, stream in told.items()}


def begin(pool: ThreadPoolExecutor, client: openai.OpenAI, prompt: str) -> tuple[Future[str], threading.Event]:
    begun = threading.Event()
    return pool.submit(streamed_text, client, prompt, TOKENS, begun, temperature=0), begun


async def in_the_middle(pool: ThreadPoolExecutor, client: openai.OpenAI) -> dict[str, Future[str]]:
    """Streams that have all begun."""
    streams = {prompt: begin(pool, client, prompt) for prompt in PROMPTS}
    for _, begun in streams.values():
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    return {prompt: stream for prompt, (stream, _) in streams.items()}


def test_workers_are_on_the_nodes_and_all_else_on_the_head(nodes: NodesServer) -> None:
    assert sorted(nodes.nodes_of_workers().values()) == list(NODES)
    others = {row["component"]: row["node"] for row in nodes.ps() if row["component"] != "VllmWorker"}
    assert set(others.values()) == {"local"}
    assert " NODE " in nodes.command("ps")


def test_logs_of_other_nodes_are_shown(nodes: NodesServer) -> None:
    watcher, node = next(iter(nodes.nodes_of_workers().items()))
    with nodes.paths_of(node).log_file(watcher).open("a") as log:
        log.write("a line of a node\n")
    assert "a line of a node" in nodes.command("logs", watcher)
    assert "a line of a node" in nodes.command("logs")
    assert f"on node {node}" in nodes.command("describe", watcher)


def test_workers_come_and_go_and_serve_meanwhile(
    nodes: NodesServer, client: openai.OpenAI, undisturbed: dict[str, str]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = asyncio.run(in_the_middle(pool, client))
        nodes.command("scale", "VllmWorker=4")
        assert sorted(nodes.nodes_of_workers().values()) == ["a", "a", "b", "b"]
        # No device is free for another one in its place.
        nodes.command("restart", "VllmWorker_3")
        assert sorted(nodes.nodes_of_workers().values()) == ["a", "a", "b", "b"]
        nodes.command("drain", "VllmWorker")
        nodes.command("drain", "VllmWorker_2")
        assert {prompt: stream.result() for prompt, stream in streams.items()} == undisturbed
    assert len(nodes.nodes_of_workers()) == 2
    nodes.command("restart", "VllmWorker_1")
    assert len(nodes.nodes_of_workers()) == 2


def test_more_workers_than_the_nodes_have_devices_are_refused(nodes: NodesServer) -> None:
    with pytest.raises(AssertionError, match="takes 5 devices, and there are 4 CPU slots"):
        nodes.command("scale", "VllmWorker=5")


def test_requests_move_between_nodes(nodes: NodesServer, client: openai.OpenAI, undisturbed: dict[str, str]) -> None:
    source, other = sorted(nodes.nodes_of_workers())
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = asyncio.run(in_the_middle(pool, client))
        moved = nodes.command("migrate", "--from", source, "--to", other)
        assert source not in moved, moved
        assert {prompt: stream.result() for prompt, stream in streams.items()} == undisturbed


def test_a_worker_that_dies_is_started_again_on_its_node(nodes: NodesServer) -> None:
    before = {row["watcher"]: row for row in nodes.ps() if row["component"] == "VllmWorker" and row["pid"]}
    name, row = next(iter(before.items()))
    os.kill(row["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = {each["watcher"]: each for each in nodes.ps()}[name]
        return (now["state"], now["node"]) == ("ready", row["node"]) and bool(now["pid"] != row["pid"])

    eventually(is_back, "it was not started again", PATIENCE_S)
    assert "killed by SIGKILL" in nodes.command("events", "--kind", "death")


def test_streams_go_on_elsewhere_when_a_node_server_is_killed(
    nodes: NodesServer, client: openai.OpenAI, undisturbed: dict[str, str]
) -> None:
    nodes.await_workers(2)
    killed = next(iter(nodes.nodes_of_workers().values()))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = asyncio.run(in_the_middle(pool, client))
        os.kill(nodes.node_pid(killed), signal.SIGKILL)
        assert {prompt: stream.result() for prompt, stream in streams.items()} == undisturbed
    # What was lost with the node is added anew.
    eventually(lambda: len(nodes.nodes_of_workers()) == 2, "the worker was not replaced", PATIENCE_S)
