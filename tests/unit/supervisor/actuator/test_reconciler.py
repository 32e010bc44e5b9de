"""When the server finishes what is left half done: what it does then is the actuator's (test_actuator.py)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.names import MAIN
from dynamo_local.supervisor.actuator import actuators as module
from dynamo_local.supervisor.actuator.actuators import Actuators, Reconciler
from state.statefile.model import State
from state.statefile.transitions import claim
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.recording import RecordingReport


class Server:
    """`changing`: the endpoints of which a change is under way. `failures`: of the next attempts. `reconciled`: the
    endpoints, in turn, "" for the graph itself."""

    def __init__(self) -> None:
        self.state: State = empty_state()
        self.changing: set[str] = set()
        self.failures: list[str] = []
        self.reconciled: list[str] = []
        self.news = asyncio.Event()
        self.report = RecordingReport()
        blueprint = SimpleNamespace(revisions=lambda: frozenset({"chat@1"}))
        self.machinery = SimpleNamespace(store=SimpleNamespace(read=lambda: self.state), blueprint=blueprint)
        self.reconciler = Reconciler(cast(Actuators, self), self.report)

    async def of(self, endpoint: str, report: object) -> Any:
        async def reconcile() -> tuple[str, ...]:
            if self.failures:
                raise SupervisorError(self.failures.pop(0))
            self.reconciled.append(endpoint)
            self.news.set()
            return ()

        return SimpleNamespace(reconcile=reconcile)

    def is_changing(self, endpoint: str) -> bool:
        return endpoint in self.changing


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    server = Server()
    running = asyncio.create_task(server.reconciler.run())
    yield server
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_mark_that_was_left_is_finished_and_a_change_under_way_is_left_alone(server: Server) -> None:
    server.changing.add(MAIN)
    server.state = claim(server.state, "dynamo_VllmWorker", role="decode", cmd="run", phase="starting")
    await server.reconciler.reconcile(MAIN)
    assert server.reconciled == []
    server.changing.clear()
    async with asyncio.timeout(60):
        await server.news.wait()
    assert set(server.reconciled) == {MAIN}


async def test_what_was_requested_or_has_failed_is_tried_until_it_succeeds(server: Server) -> None:
    server.failures = ["NATS is away", "NATS is away"]
    server.reconciler.request()
    async with asyncio.timeout(60):
        while len(server.reconciled) < 2:
            await server.news.wait()
            server.news.clear()
    assert sorted(server.reconciled) == ["", "chat"]
    assert server.report.lines.count("a change is left unfinished for now: NATS is away") in (1, 2)


async def test_a_failure_that_lasts_is_reported_once_and_one_that_comes_again_is_again(server: Server) -> None:
    for failures in (["NATS is away"] * 3, ["NATS is away"]):
        server.failures = list(failures)
        for _ in (*failures, "success"):
            await server.reconciler.reconcile("")
    assert server.report.lines == ["a change is left unfinished for now: NATS is away"] * 2
