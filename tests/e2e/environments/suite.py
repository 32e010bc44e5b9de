"""What holds wherever workers live: serve, kill, migrate, drain, plan, seen by clients who stream over HTTP meanwhile.

The engines are mockers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from dynamo_local.core.messages.presence import Presence
from state.machine.processes import start_time
from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.e2e.streams import streamed_text
from tests.integration.server_process import eventually

WORKERS = 4
TOKENS = 300
PROMPTS = [f"story number {number}: " for number in range(16)]

Told = dict[str, str]
"""Answers by prompt."""


class EnvironmentServer(LlmServer):
    """The example graph with a router, its workers where the options say."""

    def __init__(self, root: Path, namespace: str, *options: str, workers: int = WORKERS) -> None:
        graph = ["examples.llm.graphs.agg_router:Frontend", "--Frontend.model=random"]
        mockers = [
            "--VllmWorker.engine=mocker",
            "--VllmWorker.mocker-step-base-ms=15",
            f"--VllmWorker.ServiceArgs.workers={workers}",
        ]
        super().__init__(root, namespace, [*graph, *mockers, *options])

    def workers(self, number: int) -> dict[str, tuple[int, str]]:
        """Pids and nodes of the workers, by watcher, once so many are ready. As `ps` has them, without the start of a
        process."""
        found: list[Presence] = []

        def are_there(workers: list[Presence]) -> bool:
            found[:] = (one for one in workers if one.state == "ready" and start_time(one.pid) is not None)
            return len(found) == number

        asyncio.run(self.until(are_there, f"there are not {number} workers"))
        nodes = {name: entry.node for name, entry in self.state().components.items()}
        return {one.watcher: (one.pid, nodes[one.watcher]) for one in found}

    def claimed(self) -> int:
        """The number of workers that there are, or are about to be."""
        return sum(entry.holds and entry.component == "VllmWorker" for entry in self.state().components.values())

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)

    def told(
        self, disturb: Callable[[], object] = lambda: None, tokens: int = TOKENS, prompts: Sequence[str] = PROMPTS
    ) -> Told:
        """Answers that are streamed at the same time. `disturb` is called once all have begun."""
        with self.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
            begun = {prompt: threading.Event() for prompt in prompts}
            streams = {
                prompt: pool.submit(streamed_text, client, prompt, tokens, begun[prompt], temperature=0)
                for prompt in prompts
            }
            for event in begun.values():
                assert event.wait(PATIENCE_S)
            disturb()
            return {prompt: stream.result() for prompt, stream in streams.items()}


@contextmanager
def planned(root: Path, *where: str) -> Iterator[EnvironmentServer]:
    """A server with one worker, and with a planner that adds and removes workers."""
    planner = {
        "no-operation": "false",
        "policy": "concurrency",
        "requests-per-worker": 6,
        "concurrency-window": 2,
        "adjustment-interval": 1,
        "metric-pulling-interval": 0.25,
    }
    options = [f"--Planner.{key}={value}" for key, value in planner.items()]
    with EnvironmentServer(root, "planned", *where, *options, workers=1) as server:
        server.await_ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        server.assert_nothing_left()


class Suite:
    """What holds in each environment. Subclasses are collected, with fixtures `server`, `undisturbed`: the answers of a
    server that nobody disturbs, and `where`: options that say where workers live."""

    def test_workers_are_ready(self, server: EnvironmentServer, undisturbed: Told) -> None:
        assert len(server.workers(WORKERS)) == WORKERS
        assert all(undisturbed.values())

    def test_streams_are_whole_when_a_worker_is_killed(self, server: EnvironmentServer, undisturbed: Told) -> None:
        watcher, (pid, node) = next(iter(server.workers(WORKERS).items()))
        assert server.told(lambda: os.kill(pid, signal.SIGKILL)) == undisturbed
        after = server.workers(WORKERS)[watcher]
        assert after[0] != pid
        assert after[1] == node
        assert "killed by SIGKILL" in server.command("events", "--kind", "death")

    def test_streams_migrate(self, server: EnvironmentServer, undisturbed: Told) -> None:
        source = next(iter(server.workers(WORKERS)))
        rows: list[dict[str, Any]] = []
        migrate = ("migrate", "--from", source, "--json")
        # Longer than the others: the command has to start while they go on.
        told = server.told(lambda: rows.extend(json.loads(server.command(*migrate))), tokens=2 * TOKENS)
        assert {prompt: text[: len(undisturbed[prompt])] for prompt, text in told.items()} == undisturbed
        outcomes = {row["outcome"] for row in rows}
        assert "migrated" in outcomes
        # One or the other may have been over by then.
        assert outcomes <= {"migrated", "ended"}

    def test_streams_leave_a_worker_that_is_drained(self, server: EnvironmentServer, undisturbed: Told) -> None:
        drained = sorted(server.workers(WORKERS))[-1]
        assert server.told(lambda: server.command("drain", drained)) == undisturbed
        assert drained not in server.workers(WORKERS - 1)
        server.command("scale", f"VllmWorker={WORKERS}")
        server.workers(WORKERS)

    def test_the_planner_of_a_graph_adds_workers_for_the_load_and_removes_them_after_it(
        self, where: list[str], undisturbed: Told, tmp_path: Path
    ) -> None:
        with planned(tmp_path / "planned", *where) as server:
            # It has changed nothing while the server started.
            assert list(server.workers(1)) == ["planned_VllmWorker"]
            until = time.monotonic() + PATIENCE_S
            # What a worker has that is removed goes on elsewhere. One that has come too late for the load has nothing.
            while "(its worker drains)" not in server.command("events", "-n", "1000"):
                assert time.monotonic() < until, "the planner adds no worker, or removes none that has requests"
                assert server.told() == undisturbed
                few = server.told(tokens=2 * TOKENS, prompts=PROMPTS[:4])
                assert all(text.startswith(undisturbed[prompt]) for prompt, text in few.items())
            eventually(lambda: server.claimed() == 1, "the planner removes no worker", PATIENCE_S)
