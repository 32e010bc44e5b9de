"""Pins of readers, and holds of finished requests: how long blocks stay, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import Load
from dynamo_local.engine.mocker.engine import MockerEngine

from .two_engines import PROMPT, SETTINGS, Party, larger, parties, right
from .virtual_time import SharedTime

LONG = list(range(100, 154))
"""14 of the 16 blocks, with its output."""


@pytest.fixture
async def engine(time: SharedTime, tmp_path: Path) -> AsyncIterator[Party]:
    async with parties(time, tmp_path, SETTINGS) as (found,):
        yield found


async def ask(party: Party, pin: str = "p", *, keep_s: float = 10.0, fingerprint: str | None = None) -> PinAnswer:
    prefix = party.engine.prefix(PROMPT, None, None)
    assert prefix is not None
    return await party.engine.pin(PinQuestion(pin, fingerprint or prefix.fingerprint, prefix.hashes, keep_s))


class TestPin:
    async def test_keeps_blocks_out_of_usage_until_its_time_is_over_in_an_idle_engine(
        self, engine: Party, time: SharedTime
    ) -> None:
        await engine.run("r")
        asked_at = time.now
        answer = await ask(engine)
        assert (answer.blocks, answer.until, answer.refused) == (4, asked_at + 10.0, None)
        await time.settle()
        assert engine.load == Load(0, 0, 0.0, 4 / 16)
        await time.advance(asked_at + 9.999 - time.now)
        assert engine.kept == 4
        await time.advance(0.001)
        assert engine.idle

    async def test_keeps_them_from_requests_which_wait(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r", max_tokens=1)
        await ask(engine)
        await engine.submit("long", LONG, max_tokens=1)
        await time.advance(5.0)
        assert engine.load == Load(0, 1, 0.0, 4 / 16)
        await time.until(lambda: engine.finished("long"))
        assert time.now > 1010.0
        assert engine.tokens("long") == right(LONG, 1)

    async def test_may_be_taken_back_before(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r", max_tokens=1)
        await ask(engine)
        await engine.submit("long", LONG, max_tokens=1)
        await time.settle()
        await engine.engine.unpin(["unknown", "p", "p"])
        await time.until(lambda: engine.finished("long"))
        assert time.now < 1001.0
        assert engine.idle

    async def test_of_a_running_request_is_told_only_when_that_has_ended(self, engine: Party, time: SharedTime) -> None:
        await engine.submit("r", max_tokens=3)
        await time.until(lambda: bool(engine.deltas("r")))
        assert (await ask(engine)).blocks == 4
        await time.settle()
        assert engine.load == Load(1, 0, 5 / 16, 0.0)
        await time.until(lambda: engine.finished("r"))
        assert engine.load == Load(0, 0, 0.0, 4 / 16)

    async def test_counts_a_block_once(self, time: SharedTime, tmp_path: Path) -> None:
        async with parties(time, tmp_path, larger(max_pinned_share=0.25)) as (engine,):
            await engine.run("r")
            assert [(await ask(engine, f"p{n}")).blocks for n in range(3)] == [4, 4, 4]
            await engine.engine.unpin(["p0", "p2"])
            await time.settle()
            assert engine.kept == 4

    async def test_of_too_many_blocks_is_refused(self, time: SharedTime, tmp_path: Path) -> None:
        async with parties(time, tmp_path, larger(max_pinned_share=0.2)) as (engine,):
            await engine.run("r")
            answer = await ask(engine)
            assert (answer.blocks, answer.refused) == (
                0,
                "too much of the cache is kept for readers: 0 of at most 3 blocks",
            )
            assert engine.idle

    async def test_lasts_no_longer_than_is_reasonable(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r")
        answer = await ask(engine, keep_s=10**6)
        assert answer.until == time.now + SETTINGS.mocker_longest_pin_s

    async def test_is_refused_with_a_reason(self, engine: Party, time: SharedTime) -> None:
        assert (await ask(engine)).refused == "none of the blocks is here"
        await engine.run("r")
        assert (await ask(engine)).blocks == 4
        refused = [await ask(engine), await ask(engine, "q", keep_s=0.0), await ask(engine, fingerprint="vllm")]
        assert [answer.blocks for answer in refused] == [0, 0, 0]
        reasons = "a pin of that name", "for no time", "of another kind"
        for answer, reason in zip(refused, reasons, strict=True):
            assert reason in (answer.refused or "")

    async def test_is_refused_where_memory_is_not_shared(self) -> None:
        time = SharedTime()
        engine = MockerEngine(SETTINGS, clock=time.clock, sleep=time.sleep)
        assert "not shared" in ((await ask(Party(engine, time))).refused or "")


class TestPinInTheMiddleOfAStep:
    @pytest.fixture
    async def asking(self, engine: Party, time: SharedTime) -> asyncio.Task[PinAnswer]:
        await engine.submit("r", max_tokens=1)
        await time.advance(0.001)
        asking = asyncio.create_task(ask(engine))
        await time.settle()
        assert not asking.done()
        return asking

    async def test_is_answered_when_the_blocks_are_written(
        self, engine: Party, time: SharedTime, asking: asyncio.Task[PinAnswer]
    ) -> None:
        await time.until(lambda: engine.finished("r"))
        assert (await asking).blocks == 4
        assert engine.kept == 4

    async def test_whose_request_is_cancelled_is_answered_all_the_same(
        self, engine: Party, time: SharedTime, asking: asyncio.Task[PinAnswer]
    ) -> None:
        await engine.cancel("r")
        await time.until(asking.done)
        assert (await asking).blocks == 4
        # They are good: who finds them gets right tokens.
        assert await engine.run("same") == right()
        assert engine.cached("same") == 16

    async def test_and_taken_back_is_refused(
        self, engine: Party, time: SharedTime, asking: asyncio.Task[PinAnswer]
    ) -> None:
        await engine.engine.unpin(["p"])
        await time.until(asking.done)
        assert (await asking).blocks == 0
        assert engine.idle

    async def test_of_an_engine_that_is_closed_is_refused(
        self, engine: Party, time: SharedTime, asking: asyncio.Task[PinAnswer]
    ) -> None:
        await engine.engine.close(1.0)
        assert "closed" in ((await asking).refused or "")

    async def test_that_does_not_concern_it_is_answered_at_once(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r")
        await engine.submit("other", LONG[:20], max_tokens=1)
        await time.advance(0.001)
        assert (await ask(engine)).blocks == 4
        assert not engine.deltas("other")


class TestHold:
    async def test_keeps_the_blocks_of_a_finished_request_until_it_is_cancelled(
        self, engine: Party, time: SharedTime
    ) -> None:
        await engine.run("r", hold_s=30.0, max_tokens=3)
        # 20 tokens have been computed: all blocks are full.
        assert engine.load == Load(0, 0, 0.0, 5 / 16)
        await engine.submit("long", LONG, max_tokens=1)
        await time.advance(1.0)
        assert not engine.deltas("long")
        await engine.cancel("r")
        await time.until(lambda: engine.finished("long"))
        assert engine.idle

    async def test_ends_by_itself_when_its_time_is_over(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r", hold_s=3.0)
        await time.advance(2.999)
        assert engine.kept == 5
        await time.advance(0.001)
        assert engine.idle

    async def test_begins_with_the_end_of_the_last_step(self, engine: Party, time: SharedTime) -> None:
        await engine.submit("r", hold_s=3.0, max_tokens=1)
        await time.advance(0.001)
        await engine.cancel("r")
        await time.advance(0.1)
        assert engine.idle

    async def test_goes_over_into_a_pin(self, engine: Party, time: SharedTime) -> None:
        await engine.run("r", hold_s=3.0, max_tokens=1)
        await ask(engine)
        await engine.cancel("r")
        await time.settle()
        assert engine.kept == 4
        await engine.engine.unpin(["p"])
        await time.settle()
        assert engine.idle

    async def test_of_too_many_blocks_is_left_out(self, time: SharedTime, tmp_path: Path) -> None:
        async with parties(time, tmp_path, larger(max_pinned_share=0.2)) as (engine,):
            assert await engine.run("r", hold_s=30.0) == right()
            assert engine.idle

    async def test_of_a_request_that_shares_its_blocks(self, engine: Party, time: SharedTime) -> None:
        await engine.submit("r", hold_s=3.0, max_tokens=1)
        await engine.submit("same", hold_s=6.0, max_tokens=1)
        await time.until(lambda: engine.finished("same"))
        assert engine.kept == 4
        await time.advance(3.0)
        assert engine.kept == 4
        await engine.cancel("same")
        await time.settle()
        assert engine.idle


async def test_of_what_cannot_be_a_prompt_nothing_is_pulled(engine: Party) -> None:
    assert engine.engine.prefix([1, 2**63, 2, 3, 4], None, None) is None
    prefix = engine.engine.prefix([], None, None)
    assert prefix is not None
    assert (prefix.hashes, await engine.engine.cached(prefix)) == ((), 0)
