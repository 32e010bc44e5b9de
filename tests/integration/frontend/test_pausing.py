"""Requests that make room for others: they leave their workers, and go on from where they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.frontend.requests.pausing import Pauses
from dynamo_local.core.request.recovery import Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect, StartWorker
from tests.integration.fleet_of_fakes import FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, Reader, all_right, asking_for, mockers, nothing_left_at
from tests.integration.workers.worker_parts import Worker

pytestmark = pytest.mark.integration

TOKENS = 300
MAY_WAIT: Any = {"survival": Survival(), "priority": 1000}
SLOW = replace(FAST, mocker_speedup=2.0)
"""An answer takes a second and more: it has not ended when it is paused."""


def running(worker: Worker) -> int | None:
    """Requests that the worker's engine runs."""
    load = worker.context.announcer.presence.load
    return None if load is None else load.running


def pauses(front: FakeFrontend) -> Pauses:
    return front.dispatcher.pauses


async def test_paused_requests_give_the_same_answers(
    frontend: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    async with mockers(connect, subjects, tmp_path, SLOW) as start:
        workers = [await start("a"), await start("b")]
        await until(lambda: len(frontend.fleet.view.routable()) == len(workers))
        asked = {
            f"r{n}": request(f"r{n}", (n, 2, 3), max_tokens=TOKENS, sampling=asking_for(TOKENS), **MAY_WAIT)
            for n in range(6)
        }
        for one in asked.values():
            await frontend.dispatcher.submit(one)
        reader = Reader(frontend, asked)
        for tokens in (20, 60, 100):
            await reader.read(until=lambda tokens=tokens: min(map(len, reader.found.values())) > tokens)  # type: ignore[misc]
            pauses(frontend).keep(0, 1000)
            assert pauses(frontend).paused
            for worker in workers:
                await until(lambda worker=worker: not running(worker))  # type: ignore[misc]
            pauses(frontend).end()
        assert await reader.read() == all_right(asked)
        await nothing_left_at(frontend, workers)


async def test_only_those_that_may_wait_are_paused(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    worker = await start_worker("a")
    await frontend.knows(worker)
    for name, priority in (("people", 0), ("first", 1000), ("second", 1000)):
        await frontend.dispatcher.submit(request(name, priority=priority))
        await worker.submitted()
    pauses(frontend).keep(1, 1000)
    assert pauses(frontend).paused == 1
    assert frontend.dispatcher.table.requests["second"].log.worker is None
    # One that its client gives up meanwhile is gone for good.
    await frontend.dispatcher.cancel(["second"])
    pauses(frontend).end()
    assert pauses(frontend).paused == 0
    assert frontend.local.ledger.outstanding("a") == 6
