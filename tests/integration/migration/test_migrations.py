"""A frontend and mockers between which requests migrate: no answer changes, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from components.frontend.requests.live_requests import LiveRequest
from dynamo_local.core.messages.admin import RequestsAnswer, RequestsQuestion
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import (
    FAST,
    Reader,
    StartMocker,
    all_right,
    asking_for,
    mockers,
    nothing_left_at,
)

pytestmark = pytest.mark.integration

ROOMY = replace(FAST, mocker_speedup=4.0, mocker_kv_blocks=8192)
"""One worker can take in all that another one has, however far that has come meanwhile; and streams last."""


@pytest.fixture
async def mocked(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[StartMocker]:
    async with mockers(connect, subjects, tmp_path, ROOMY) as start:
        yield start


def long_one(name: str, prompt_tokens: int = 100, tokens: int = 600, **more: object) -> Request:
    prompt = tuple(random.Random(name).choices(range(FAST.mocker_vocab_size), k=prompt_tokens))
    return request(name, prompt, sampling=asking_for(tokens), max_tokens=tokens, survival=Survival(), **more)


def live(front: FakeFrontend, name: str) -> LiveRequest:
    return front.dispatcher.table.requests[name]


async def knows(front: FakeFrontend, workers: int) -> None:
    await until(lambda: len(front.fleet.view.routable()) == workers)
    await until(lambda: all(p.engine is not None for p in front.fleet.view.routable()))


async def test_a_stream_migrates_in_the_middle(frontend: FakeFrontend, mocked: StartMocker) -> None:
    source = await mocked("a")
    await knows(frontend, 1)
    asked = {"r": long_one("r")}
    await frontend.dispatcher.submit(asked["r"])
    reader = Reader(frontend, asked)
    await reader.read(lambda: len(reader.found["r"]) > 50)
    destination = await mocked("b")
    await knows(frontend, 2)
    watchers = {presence.lease: presence.watcher for presence in frontend.fleet.view.members()}
    events: list[Event] = []
    frontend.dispatcher.migrations.record = events.append
    subject = frontend.subjects.requests(frontend.lease)
    told = await frontend.bus.ask(subject, RequestsQuestion(5), RequestsAnswer, timeout_s=DEADLINE_S)
    (row,) = told.requests
    assert (row.worker, row.epoch_start, row.migrations, row.prefill, row.stays) == ("a", 0, 0, None, None)
    assert (row.fidelity, row.epoch_age_s is not None and 0 <= row.epoch_age_s <= row.age_s) == ("exact", True)
    moved = frontend.dispatcher.migrations.order(live(frontend, "r"), "b")
    record = live(frontend, "r").migration
    assert await reader.read() == all_right(asked)
    result = moved.result()
    assert (result.outcome, result.worker, record.times) == ("migrated", "b", 1)
    assert result.gap_s is not None
    (event,) = events
    assert event.what.startswith(f"migrated to {watchers['b']}, gap ")
    assert (event.request, event.outcome, event.gap_s) == ("r", "migrated", result.gap_s)
    assert (event.why, event.watcher) == ("`dynamo migrate`", watchers["a"])
    assert (
        frontend.dispatcher.migrations.statistics.pulled_tokens
        >= 100 // FAST.mocker_block_size * FAST.mocker_block_size
    )
    await nothing_left_at(frontend, [source, destination])


async def test_a_draining_worker_is_left_by_all_its_streams(frontend: FakeFrontend, mocked: StartMocker) -> None:
    source = await mocked("a")
    await knows(frontend, 1)
    asked = {f"r{n}": long_one(f"r{n}", 50 + 20 * n, 1000) for n in range(16)}
    for one in asked.values():
        await frontend.dispatcher.submit(one)
    reader = Reader(frontend, asked)
    await reader.read(lambda: all(reader.found.values()))
    destination = await mocked("b")
    await knows(frontend, 2)
    await source.announce("draining")
    draining = asyncio.create_task(source.service.drain(DEADLINE_S))
    reading = asyncio.create_task(reader.read())
    await asyncio.wait_for(draining, DEADLINE_S)
    assert not reading.done(), "the streams were to be longer than the drain"
    assert await reading == all_right(asked)
    # A migration that could not be begun is tried again.
    outcomes = frontend.dispatcher.migrations.statistics.outcomes
    assert outcomes["migrated", "drain"] == 16, outcomes
    assert outcomes.keys() <= {("migrated", "drain"), ("stayed", "drain")}
    await nothing_left_at(frontend, [source, destination])


async def test_what_cannot_be_moved_finishes_where_it_is(frontend: FakeFrontend, mocked: StartMocker) -> None:
    source = await mocked("a")
    await knows(frontend, 1)
    seeded = long_one("r", tokens=300)
    seeded = structs.replace(seeded, survival=Survival(Fidelity.NONE, "seed"))
    await frontend.dispatcher.submit(seeded)
    reader = Reader(frontend, ["r"])
    await reader.read(lambda: len(reader.found["r"]) > 5)
    destination = await mocked("b")
    await knows(frontend, 2)
    assert frontend.dispatcher.migrations.why_not(live(frontend, "r")) == "the state of seed would be lost"
    await source.announce("draining")
    reading = asyncio.create_task(reader.read())
    await asyncio.wait_for(source.service.drain(DEADLINE_S), DEADLINE_S)
    assert await reading == all_right({"r": seeded})
    assert frontend.dispatcher.migrations.statistics.outcomes == {}
    await nothing_left_at(frontend, [source])
    counts = destination.context.announcer.presence.counts
    assert counts is not None
    assert counts.requests == 0
