"""Endpoints whose workers live on the nodes of a cluster, of a real server with mockers. The nodes are child processes,
the frontend is imitated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.control.operations import DELETE_ENDPOINT, SCALE_ENDPOINT, WAKE_ENDPOINT
from dynamo_local.core.names import LOCAL_NODE
from state.paths import StatePaths
from tests.child_nodes import node_root, pid_file
from tests.integration.endpoints.endpoint_server import NAMESPACE, EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration

PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointServer]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("NODES", "a=2,b=2")
        with EndpointServer(tmp_path_factory.mktemp("nodes") / "head", slots=1) as server:
            yield server
            print(server.rest_of_output())


def nodes_of(server: EndpointServer, revision: str) -> Counter[str]:
    """How many workers of a revision hold devices on each node."""
    entries = server.state().components.values()
    return Counter(entry.node for entry in entries if entry.watcher.revision == revision and entry.holds)


def logs(server: EndpointServer, endpoint: str) -> str:
    """What `dynamo endpoint logs` prints."""
    command = [sys.executable, "-m", "dynamo_local.cli.main", "endpoint", "logs", endpoint, "--namespace", NAMESPACE]
    environ = os.environ | {"DYN_LOCAL_STATE_DIR": str(server.paths.root)}
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=60).stdout


def node_pid(server: EndpointServer, node: str) -> int:
    return int(pid_file(server.paths.root, node).read_text())


def test_what_a_dead_node_has_lost_starts_elsewhere(server: EndpointServer) -> None:
    assert server.create("chat", min_workers=0, max_workers=4, sleep_after_s=600).refused is None
    server.await_state("chat", "asleep")
    assert not nodes_of(server, "chat@1")
    assert server.order(WAKE_ENDPOINT, "chat").refused is None
    assert server.order(SCALE_ENDPOINT, "chat", {"workers": 2}).refused is None
    server.await_ready("chat", 2)
    assert nodes_of(server, "chat@1") == {"a": 1, "b": 1}
    for watcher, entry in server.state().components.items():
        if entry.node != LOCAL_NODE and entry.holds:
            paths = StatePaths(node_root(server.paths.root, entry.node) / "state", NAMESPACE)
            with paths.log_file(watcher).open("a") as log:
                log.write(f"a line of {entry.node}\n")
    shown = logs(server, "chat")
    assert "a line of a" in shown
    assert "a line of b" in shown

    (node_root(server.paths.root, "a") / "dead").touch()
    os.kill(node_pid(server, "a"), signal.SIGKILL)
    eventually(lambda: nodes_of(server, "chat@1") == {"b": 2}, "what was lost does not start elsewhere", PATIENCE_S)
    server.await_ready("chat", 2)


def test_endpoints_take_turns_on_the_devices_of_a_node(server: EndpointServer) -> None:
    assert server.create("pair", min_workers=0, max_workers=1, gpu=2).refused is None
    server.await_state("pair", "asleep")
    # Both devices that there are are held by `chat`, which has no request.
    server.ask("pair")
    server.await_ready("pair")
    (entry,) = (entry for entry in server.state().components.values() if entry.watcher.revision == "pair@1")
    assert (entry.node, sorted(entry.devices)) == ("b", [0, 1])
    assert not nodes_of(server, "chat@1")


def test_without_workers_nothing_runs_on_the_nodes(server: EndpointServer) -> None:
    pid = node_pid(server, "b")
    server.order(DELETE_ENDPOINT, "pair")
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the node server does not end", PATIENCE_S)
    eventually(lambda: server.status("pair") is None, "it is not deleted")


def test_more_than_all_nodes_have_is_refused_and_so_are_adapters(server: EndpointServer) -> None:
    refused = server.create("huge", min_workers=3, max_workers=3).refused
    assert refused is not None
    # One of the two nodes is dead.
    assert "needs 3 CPU slots" in refused.message
    assert "there are 2" in refused.message
    assert "add a node to the cluster" in refused.message
    refused = server.create("pirate", engine=None, model="/adapters/pirate", adapter_of="chat").refused
    assert refused is not None
    assert "cannot be served on a cluster" in refused.message
