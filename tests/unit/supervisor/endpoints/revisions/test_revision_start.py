"""A start for which nothing could be reserved, as on a cluster that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from dynamo_local.core.endpoints.rollout.steps import Start
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker, DeviceLimits
from dynamo_local.supervisor.endpoints.revisions.launch import Launched
from dynamo_local.supervisor.endpoints.revisions.observing import Room
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.actuator.fake_ports import template
from tests.unit.supervisor.endpoints.revisions.test_revision_end import run_of


class Reserving:
    """An actuator that can reserve nothing for this reason; empty: whose workers start."""

    def __init__(self, why: str) -> None:
        self.why = why

    @asynccontextmanager
    async def open(self, endpoint: str) -> AsyncIterator[Reserving]:
        yield self

    async def apply_all(self, changes: Sequence[AddWorker], limits: DeviceLimits) -> list[ActionOutcome]:
        watcher = None if self.why else "many_chat@1_VllmWorker"
        return [ActionOutcome(change, not self.why, watcher, self.why, 0.0) for change in changes]

    async def require(self, name: object, check: object) -> None:
        pass


def test_an_endpoint_says_why_nothing_could_be_reserved_for_it() -> None:
    async def scenario() -> None:
        actuator, heard = Reserving("node a does not answer"), asyncio.Event()
        run = run_of(None, actuator.open, actuator, heard.set)
        templates = (template("VllmWorker", "aggregated", revision="chat@1"),)
        run.launched = Launched(cast("Any", None), templates)
        run.carry_out(Start(1, 1, 0))
        await heard.wait()
        seen = run.seen(empty_state(), Room(1))
        assert (seen.shortage, seen.failures) == ("node a does not answer", 0)
        assert run.seen(empty_state(), Room(0, "no device")).shortage == "no device"
        actuator.why = ""
        heard.clear()
        run.carry_out(Start(1, 1, 0))
        await heard.wait()
        assert run.seen(empty_state(), Room(1)).shortage == ""

    asyncio.run(scenario())
