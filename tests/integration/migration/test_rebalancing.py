"""Frontends whose workers are unevenly full: which requests migrate, which do not, and that no answer changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from components.frontend.migration.rebalancer import Rebalancer
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.settings import MockerSettings
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import (
    FAST,
    Reader,
    StartMocker,
    all_right,
    asking_for,
    mockers,
    nothing_left_at,
    right,
)

pytestmark = pytest.mark.integration

SETTINGS = MockerSettings(mocker_speedup=0.5, mocker_block_size=8, mocker_kv_blocks=150)
"""1,200 tokens, and steps of 16 ms: nothing ends in the course of a test."""
NEVER_AGAIN_S = 3600.0
LIMITS = RebalancingLimits(below=60, above=120, period_s=NEVER_AGAIN_S)
ONLY_THRASHING = RebalancingLimits(below=0, above=1e6, period_s=NEVER_AGAIN_S)
ONLY_ROOM = RebalancingLimits(below=20, above=1e6, period_s=NEVER_AGAIN_S)


@pytest.fixture
async def mocked(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[StartMocker]:
    async with mockers(connect, subjects, tmp_path, SETTINGS) as start:
        yield start


def stream(name: str, prompt_tokens: int, tokens: int = 600, **more: object) -> Request:
    start = sum(map(ord, name))
    prompt = tuple((start + n * n) % FAST.mocker_vocab_size for n in range(prompt_tokens))
    known = {"survival": Survival(), **more}
    return request(name, prompt, sampling=asking_for(tokens), max_tokens=tokens, **known)


async def begin(front: FakeFrontend, asked: Mapping[str, Request]) -> Reader:
    """All of them have brought tokens."""
    for one in asked.values():
        await front.dispatcher.submit(one)
    reader = Reader(front, asked)
    await reader.read(lambda: all(reader.found.values()))
    return reader


async def end(front: FakeFrontend, reader: Reader, asked: Mapping[str, Request]) -> None:
    """What has come was right, and more is not wanted."""
    for name, found in reader.found.items():
        assert found == right(asked[name])[: len(found)]
    await front.dispatcher.cancel(list(asked))


async def knows(front: FakeFrontend, workers: int) -> None:
    await until(lambda: len(front.fleet.view.routable()) == workers)
    await until(lambda: all(p.engine is not None for p in front.fleet.view.routable()))


def rebalance(front: FakeFrontend, limits: RebalancingLimits | None) -> None:
    Rebalancer(front.dispatcher.migrations, front.fleet, lambda: limits, front.tasks).start()


def moved(front: FakeFrontend, reason: str) -> int:
    return front.dispatcher.migrations.statistics.outcomes["migrated", reason]


def owners(front: FakeFrontend) -> list[str | None]:
    return [live.log.worker for live in front.dispatcher.migrations.requests.values()]


async def test_skewed_streams_of_two_frontends_are_levelled_and_then_stay(
    frontend: FakeFrontend, connect: Connect, subjects: Subjects, mocked: StartMocker
) -> None:
    other = await FakeFrontend(await connect(), subjects, lease="f2").start()
    fronts = (frontend, other)
    a = await mocked("a")
    for front in fronts:
        await knows(front, 1)
    asked = [{f"{n}-{front.lease}": stream(f"{n}-{front.lease}", 60 + 10 * n) for n in range(4)} for front in fronts]
    readers = [await begin(front, theirs) for front, theirs in zip(fronts, asked, strict=True)]
    b = await mocked("b")
    for front in fronts:
        await knows(front, 2)
        rebalance(front, LIMITS)
    reader = readers[0]
    await reader.read(lambda: sum(moved(front, "rebalance") for front in fronts) > 0)
    lengths = [len(found) for found in reader.found.values()]
    await reader.read(lambda: min(len(found) for found in reader.found.values()) > max(lengths) + 60)
    assert sum(moved(front, "rebalance") for front in fronts) <= 8
    assert {owner for front in fronts for owner in owners(front)} == {"a", "b"}
    for front, reader, theirs in zip(fronts, readers, asked, strict=True):
        assert all(live.log.epoch <= 2 for live in front.dispatcher.migrations.requests.values())
        await end(front, reader, theirs)
    for front in fronts:
        await nothing_left_at(front, [a, b])
    await other.close()


async def test_others_make_way_for_a_request_that_does_not_fit(frontend: FakeFrontend, mocked: StartMocker) -> None:
    a = await mocked("a")
    await knows(frontend, 1)
    asked = {f"r{n}": stream(f"r{n}", 200) for n in range(4)}
    reader = await begin(frontend, asked)
    asked["large"] = stream("large", 600, 50)
    await frontend.dispatcher.submit(asked["large"])
    await until(lambda: owners(frontend) == ["a"] * 5)
    # Nobody but the first of a queue tells how much it needs.
    b = await mocked("b")
    await knows(frontend, 2)
    rebalance(frontend, ONLY_ROOM)
    large = Reader(frontend, asked)
    large.found |= reader.found
    await large.read(lambda: bool(large.found["large"]))
    assert owners(frontend).count("b") == moved(frontend, "room") == 2
    assert frontend.dispatcher.migrations.requests["large"].log.worker == "a"
    await end(frontend, large, asked)
    await nothing_left_at(frontend, [a, b])


async def test_a_worker_that_thrashes_gives_some_away_and_ceases(frontend: FakeFrontend, mocked: StartMocker) -> None:
    """Together they become longer than what one worker can hold."""
    a = await mocked("a")
    await knows(frontend, 1)
    asked = {f"r{n}": stream(f"r{n}", 80, 160) for n in range(8)}
    reader = await begin(frontend, asked)
    await reader.read(lambda: bool((a.context.announcer.presence.load or Load()).recomputed_tokens))
    b = await mocked("b")
    await knows(frontend, 2)
    rebalance(frontend, ONLY_THRASHING)
    await reader.read(lambda: moved(frontend, "thrash") > 0)
    await reader.read()
    assert reader.found == all_right(asked)
    # Five fit to their ends.
    assert frontend.dispatcher.migrations.statistics.outcomes.total() <= 5
    assert {reason for _, reason in frontend.dispatcher.migrations.statistics.outcomes} == {"thrash"}
    await nothing_left_at(frontend, [a, b])


@pytest.mark.parametrize(
    ("limits", "survival"),
    [(None, Survival()), (LIMITS, Survival(Fidelity.NONE, "seed")), (replace(LIMITS, below=0), Survival())],
)
async def test_nothing_migrates_if_it_is_off_or_impossible_or_all_is_well(
    frontend: FakeFrontend, mocked: StartMocker, limits: RebalancingLimits | None, survival: Survival
) -> None:
    a = await mocked("a")
    await knows(frontend, 1)
    asked = {f"r{n}": stream(f"r{n}", 80, survival=survival) for n in range(8)}
    reader = await begin(frontend, asked)
    b = await mocked("b")
    await knows(frontend, 2)
    rebalance(frontend, limits)
    await reader.read(lambda: min(len(found) for found in reader.found.values()) > 60)
    assert frontend.dispatcher.migrations.statistics.outcomes == {}
    assert set(owners(frontend)) == {"a"}
    await end(frontend, reader, asked)
    await nothing_left_at(frontend, [a, b])
