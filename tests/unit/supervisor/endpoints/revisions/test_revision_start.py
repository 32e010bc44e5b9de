"""A start for which nothing could be reserved, as on a cluster that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from dynamo_local.core.endpoints.rollout import Start
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker, DeviceLimits
from dynamo_local.supervisor.endpoints.revisions.launch import Launched
from dynamo_local.supervisor.places.capacity import Startable
from state.statefile.model import State
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.actuator.fake_ports import template
from tests.unit.supervisor.endpoints.revisions.test_revision_end import run_of


class Reserving:
    """An actuator that can reserve nothing for this reason; empty: whose workers start."""

    def __init__(self, why: str, *, node_failed: bool = False) -> None:
        self.why = why
        self.node_failed = node_failed
        self.changes: list[AddWorker] = []

    async def of(self, endpoint: str, report: object, *, gone: object) -> Reserving:
        return self

    async def apply_all(self, changes: Sequence[AddWorker], limits: DeviceLimits) -> list[ActionOutcome]:
        watcher = None if self.why else "many_chat@1_VllmWorker"
        self.changes += changes
        return [
            ActionOutcome(change, not self.why, watcher, self.why, 0.0, node_failed=self.node_failed)
            for change in changes
        ]

    async def require(self, name: object, check: object) -> None:
        pass


def test_an_endpoint_says_why_nothing_could_be_reserved_for_it() -> None:
    async def scenario() -> None:
        actuator, heard = Reserving("node a does not answer"), asyncio.Event()
        run = run_of(None, actuator, actuator, heard.set)
        templates = (template("VllmWorker", "aggregated", revision="chat@1"),)
        run.launched = Launched(cast("Any", None), templates)
        run.carry_out(Start(1, 1, 0))
        await heard.wait()
        seen = run.seen(empty_state(), Startable(1))
        assert (seen.shortage, seen.failures) == ("node a does not answer", 0)
        assert run.seen(empty_state(), Startable(0, "no device")).shortage == "no device"
        actuator.why = ""
        heard.clear()
        run.carry_out(Start(1, 1, 0))
        await heard.wait()
        assert run.seen(empty_state(), Startable(1)).shortage == ""

    asyncio.run(scenario())


def test_a_node_that_can_run_nothing_is_a_failure_that_is_tried_less_and_less_often() -> None:
    async def scenario() -> None:
        why = "no node server runs on node a: other versions"
        actuator, heard, failures = Reserving(why, node_failed=True), asyncio.Event(), []
        run = run_of(None, actuator, actuator, heard.set)
        run.launched = Launched(cast("Any", None), (template("VllmWorker", "aggregated", revision="chat@1"),))
        for _ in range(3):
            heard.clear()
            run.carry_out(Start(1, 1, 0))
            await heard.wait()
            seen = run.seen(empty_state(), Startable(1))
            failures.append((seen.failures, seen.error, seen.may_start))
        assert failures == [(number, why, False) for number in (1, 2, 3)]

    asyncio.run(scenario())


def test_workers_start_on_the_nodes_that_turns_have_decided_and_no_more_of_them() -> None:
    async def scenario() -> None:
        actuator, heard, asked = Reserving(""), asyncio.Event(), list[tuple[str, tuple[float, ...]]]()
        run = run_of(None, actuator, actuator, heard.set)

        def nodes(endpoint: str, state: State, amounts: Sequence[float]) -> Sequence[str]:
            asked.append((endpoint, tuple(amounts)))
            return ("b", "a")

        run._parts = replace(run._parts, turns=cast("Any", SimpleNamespace(nodes=nodes)))
        run.launched = Launched(cast("Any", None), (template("VllmWorker", "aggregated", 2, revision="chat@1"),))
        run.carry_out(Start(1, 3, 0))
        await heard.wait()
        assert asked == [("chat", (2, 2, 2))]
        assert [change.node for change in actuator.changes] == ["b", "a"]

    asyncio.run(scenario())
