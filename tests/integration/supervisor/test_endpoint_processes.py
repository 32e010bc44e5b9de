"""Workers of endpoints in a running server, from the first to the last process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import DELETE_ENDPOINT, DRAIN_WORKER, RESTART_WORKERS, SCALE_ENDPOINT
from dynamo_local.control.orders import carry_out
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.routing import Assignment, AssignRequest
from dynamo_local.core.planning.actions import Action, AddWorker
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.session import bus_of
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.graph import load_graph
from dynamo_local.supervisor.server.launch.blueprint import BlueprintFile
from dynamo_local.supervisor.server.launch.plan import revision_templates
from state.files import make_private_directory
from state.statefile.store import StateStore
from state.statefile.transitions import claim
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually
from tests.unit.supervisor.recording import RecordingReport

pytestmark = pytest.mark.integration

NAMESPACE = "many"
ADD = AddWorker("aggregated", "VllmWorker", "chat@1")


class EndpointServer(ServerProcess):
    """A server without workers of its own, and what the controller of endpoints does, by hand."""

    def __init__(self, root: Path) -> None:
        graph = "tests.integration.supervisor.endpoint_graph:Front"
        super().__init__(root, NAMESPACE, ["-m", "tests.integration.supervisor.serve_by_hand", graph, NAMESPACE, "4"])
        self.await_start()
        self.blueprint = BlueprintFile(self.paths)
        self.client = ControlClient(self.paths)

    def launch(self, revision: str, graph: ResolvedGraph) -> None:
        path = self.paths.graph_of(revision)
        make_private_directory(path.parent)
        path.write_bytes(graph.to_json())
        templates = revision_templates(graph, revision, self.paths.root)
        self.blueprint.change(lambda blueprint: blueprint.with_revision(templates))

    def change(self, *changes: Action) -> list[str]:
        """Make changes of endpoint chat at the same time. Returns the watchers of those that were made."""
        found = self.client.do(SCALE_ENDPOINT, {"changes": changes}, name="chat", timeout_s=PATIENCE_S)
        return [watcher for watcher, done in found if done]

    def end_revision(self, revision: str) -> list[str]:
        watchers: list[str] = self.client.do(DELETE_ENDPOINT, name=revision, timeout_s=PATIENCE_S)
        return watchers

    def pids(self) -> dict[str, int | None]:
        """Of the workers of endpoints, by watcher without its namespace."""
        components = self.state().components
        return {n.removeprefix(f"{NAMESPACE}_"): c.pid for n, c in components.items() if c.watcher.revision}

    async def assigned(self, requests: Sequence[str], revision: str) -> list[str | None]:
        """Watchers that the router assigns requests to."""
        watchers = {c.lease: n.removeprefix(f"{NAMESPACE}_") for n, c in self.state().components.items()}
        async with bus_of(self.paths, "test") as bus:
            subject = Subjects(NAMESPACE, revision).assign
            questions = [AssignRequest(request, "frontend", 10) for request in requests]
            answers = [await bus.ask(subject, one, Assignment, timeout_s=PATIENCE_S) for one in questions]
        return [None if one.worker is None else watchers[one.worker] for one in answers]


def mockers() -> ResolvedGraph:
    graph = load_graph("tests.integration.supervisor.routed_graph:Front")
    return resolve(graph, None, ("--VllmWorker.engine=mocker",), NAMESPACE)


def test_the_workers_of_a_revision_from_the_first_to_the_last(tmp_path: Path) -> None:
    with EndpointServer(tmp_path) as server:
        graph = mockers()
        for revision in ("chat@1", "chat@2"):
            server.launch(revision, graph)
        made = server.change(ADD, ADD, ADD)
        workers = ["chat@1_VllmWorker", "chat@1_VllmWorker_1", "chat@1_VllmWorker_2"]
        assert made == [f"{NAMESPACE}_{name}" for name in workers]
        # Each revision has a router's ledger of its own, and workers of its own. A router that hears of a revision
        # assigns as soon as it knows one of its workers.
        numbers = count()
        found = set[str | None]()

        def all_are_assigned_to() -> bool:
            found.update(asyncio.run(server.assigned([f"r{next(numbers)}"], "chat@1")))
            return found >= set(workers)

        eventually(all_are_assigned_to, "the router does not know all workers")
        assert found == set(workers)
        assert asyncio.run(server.assigned(["a"], "chat@2")) == [None]

        before = server.pids()
        os.kill(server.circusd_pid(), signal.SIGKILL)
        server.line("another circusd runs and has", "the 6 processes that run")
        assert server.pids() == before
        server.paths.graph_of("chat@1").unlink()
        eventually(server.paths.graph_of("chat@1").exists, "its graph is not written anew")
        first = before["chat@1_VllmWorker"]
        assert first is not None
        os.kill(first, signal.SIGKILL)
        server.line("chat@1_VllmWorker  ended: killed by SIGKILL, restart in")
        server.line("chat@1_VllmWorker  ready")

        # Whoever claimed it was killed before it started anything.
        left = f"{NAMESPACE}_chat@1_VllmWorker_3"
        StateStore(server.paths).update(lambda state: claim(state, left, role="aggregated", cmd="x", phase="starting"))
        server.line("chat@1_VllmWorker_3 has no process: its claim")
        server.change(AddWorker("aggregated", "VllmWorker", "chat@2"))
        assert sorted(server.end_revision("chat@1")) == [f"{NAMESPACE}_{name}" for name in workers]
        server.blueprint.change(lambda blueprint: blueprint.without_revision("chat@1"))
        assert set(server.pids()) == {"chat@2_VllmWorker"}

        client, step = server.client, RecordingReport().step
        with pytest.raises(UsageError, match="endpoint chat, whose number of workers the server keeps"):
            carry_out(client, DRAIN_WORKER, {}, step, watcher="chat@2_VllmWorker")
        (restarted,) = carry_out(client, RESTART_WORKERS, {"name": "chat"}, step)
        assert (restarted["done"], restarted["watcher"]) == (True, f"{NAMESPACE}_chat@2_VllmWorker_1")
        holding = {name for name, component in server.state().components.items() if component.holds}
        assert {process.environ["DYN_WATCHER"] for process in server.processes()} == holding
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        server.assert_nothing_left()
