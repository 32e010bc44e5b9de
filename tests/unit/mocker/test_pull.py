"""Pulls: an engine reads the blocks of another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.mocker.engine import MockerEngine

from .two_engines import PROMPT, SETTINGS, Party, larger, parties, right
from .virtual_time import SharedTime

OTHER = [100 + token for token in PROMPT]


class TestPull:
    async def test_brings_blocks_that_count_as_cached(self, pair: list[Party]) -> None:
        source, reader = pair
        assert await source.run("first") == right()
        pulled = await reader.ask(source)
        assert pulled.answer.blocks == 4
        assert await reader.run("second", pulled=pulled) == right()
        assert reader.cached("second") == 16
        await source.engine.unpin([pulled.pin])
        await source.time.settle()
        assert (source.idle, reader.idle) == (True, True)

    async def test_takes_its_time_and_then_one_step(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source)
        begun = time.now
        await reader.submit("second", pulled=pulled, max_tokens=1)
        await time.until(lambda: reader.finished("second"))
        # 100 ms and 10 ms a block; 10 ms and 1 ms a token.
        assert time.now - begun == pytest.approx(0.140 + 0.012)

    async def test_holds_the_blocks_of_the_whole_prompt_and_lets_others_run(
        self, pair: list[Party], time: SharedTime
    ) -> None:
        source, reader = pair
        await source.run("first")
        await reader.submit("second", pulled=await reader.ask(source))
        await time.settle()
        assert reader.load == Load(0, 1, 5 / 16, 0.0)
        assert await reader.run("third", OTHER) == right(OTHER)
        assert not reader.deltas("second")

    async def test_of_what_is_here_already_is_left_out(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("first")
        await reader.run("short", PROMPT[:9], max_tokens=1)
        prefix = reader.engine.prefix(PROMPT, None, None)
        assert prefix is not None
        assert (len(prefix.hashes), await reader.engine.cached(prefix)) == (4, 2)
        pulled = await reader.ask(source)
        begun = time.now
        await reader.run("second", pulled=pulled, max_tokens=1)
        assert time.now - begun == pytest.approx(0.120 + 0.012)
        assert reader.cached("second") == 16

    async def test_of_the_missing_hashes_alone(self, pair: list[Party]) -> None:
        source, reader = pair
        await source.run("first")
        await reader.run("short", PROMPT[:9], max_tokens=1)
        prefix = reader.engine.prefix(PROMPT, None, None)
        assert prefix is not None
        question = PinQuestion("p", prefix.fingerprint, prefix.hashes[2:], 1000.0)
        pulled = PulledPrefix("p", question.hashes, await source.engine.pin(question))
        assert await reader.run("second", pulled=pulled) == right()
        assert reader.cached("second") == 16

    async def test_of_what_has_come_here_meanwhile_is_not_done(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source)
        await reader.run("same", max_tokens=1)
        begun = time.now
        await reader.run("second", pulled=pulled, max_tokens=1)
        assert time.now - begun == pytest.approx(0.012)

    async def test_of_a_part_leaves_the_rest_to_be_computed(self, pair: list[Party]) -> None:
        source, reader = pair
        await source.run("first", PROMPT[:10])
        pulled = await reader.ask(source)
        assert pulled.answer.blocks == 2
        assert await reader.run("second", pulled=pulled) == right()
        assert reader.cached("second") == 8

    async def test_serves_later_requests_too(self, pair: list[Party]) -> None:
        source, reader = pair
        await source.run("first")
        await reader.run("second", pulled=await reader.ask(source))
        assert await reader.run("third", [*PROMPT, 7]) == right([*PROMPT, 7])
        assert reader.cached("third") == 16

    async def test_works_the_other_way_round_at_the_same_time(self, pair: list[Party], time: SharedTime) -> None:
        one, other = pair
        await one.run("a")
        await other.run("b", OTHER)
        await one.submit("b", OTHER, pulled=await one.ask(other, OTHER))
        await other.submit("a", pulled=await other.ask(one))
        await time.until(lambda: one.finished("b") and other.finished("a"))
        assert (one.tokens("b"), other.tokens("a")) == (right(OTHER), right())
        assert (one.cached("b"), other.cached("a")) == (16, 16)

    async def test_of_several_requests_is_done_one_after_another(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("a")
        await source.run("b", OTHER)
        offers = [await reader.ask(source), await reader.ask(source, OTHER)]
        begun = time.now
        await reader.submit("a", pulled=offers[0], max_tokens=1)
        await reader.submit("b", OTHER, pulled=offers[1], max_tokens=1)
        await time.until(lambda: reader.finished("b"))
        assert time.now - begun == pytest.approx(0.140 + 0.140 + 0.012)
        assert (reader.cached("a"), reader.cached("b")) == (16, 16)


class TestForeignKv:
    """A source that does not keep its promise reports nothing, but wrong tokens show it."""

    async def test_gives_wrong_tokens(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("first", max_tokens=1)
        pulled = await reader.ask(source)
        await reader.submit("second", pulled=pulled, max_tokens=8)
        await time.settle()
        await source.engine.unpin([pulled.pin])
        await source.run("others", list(range(200, 255)), max_tokens=8)
        assert time.now < pulled.answer.until
        await time.until(lambda: reader.finished("second"))
        assert reader.cached("second") == 16
        assert reader.tokens("second") != right(count=8)
        # That is what poison is: it stays in the cache.
        assert await reader.run("third", [*PROMPT, 1], max_tokens=8) != right([*PROMPT, 1], 8)

    async def test_is_what_a_block_holds_before_it_is_written(self, pair: list[Party], time: SharedTime) -> None:
        # The answer to a question in the middle of a step waits for its end. Read without that:
        source, reader = pair
        await source.submit("first", max_tokens=1)
        await time.advance(0.001)
        asking = asyncio.create_task(reader.ask(source))
        await time.settle()
        assert not asking.done()
        assert len(source.engine._scheduler.leases.references) == 4
        unwritten = source.engine._scheduler.memory.read(range(16))
        assert unwritten == [bytes(16)] * 16
        await time.until(asking.done)
        assert (await asking).answer.blocks == 4
        assert await reader.run("second", pulled=await asking) == right()


class TestPreemption:
    async def test_at_the_source_leaves_pinned_blocks_alone(self, time: SharedTime, tmp_path: Path) -> None:
        small = larger(kv_blocks=10)
        async with parties(time, tmp_path, small, SETTINGS) as (source, reader):
            await source.submit("first", max_tokens=12, priority=1)
            await time.until(lambda: bool(source.tokens("first")))
            pulled = await reader.ask(source)
            await source.submit("urgent", OTHER, max_tokens=6, priority=0)
            # Preempted, and nothing but the pin keeps them:
            await time.until(lambda: source.kept == 4)
            assert not source.finished("first")
            assert await reader.run("second", pulled=pulled) == right()
            assert reader.cached("second") == 16
            await time.until(lambda: source.finished("first") and source.finished("urgent"))
            assert 3 in events_of(source, "first")
            assert (source.tokens("first"), source.tokens("urgent")) == (right(count=12), right(OTHER, 6))

    async def test_at_the_reader_of_one_that_was_read_for(self, time: SharedTime, tmp_path: Path) -> None:
        small = larger(kv_blocks=10)
        async with parties(time, tmp_path, SETTINGS, small) as (source, reader):
            await source.run("first")
            await reader.submit("second", pulled=await reader.ask(source), max_tokens=12, priority=1)
            await time.until(lambda: bool(reader.deltas("second")))
            await reader.submit("urgent", OTHER, max_tokens=12, priority=0)
            await time.until(lambda: reader.finished("second") and reader.finished("urgent"))
            assert 3 in events_of(reader, "second")
            assert reader.tokens("second") == right(count=12)
            assert reader.tokens("urgent") == right(OTHER, 12)
            assert reader.idle

    async def test_never_takes_the_blocks_that_are_read_into(self, time: SharedTime, tmp_path: Path) -> None:
        small = larger(kv_blocks=10)
        async with parties(time, tmp_path, SETTINGS, small) as (source, reader):
            await source.run("first")
            pulled = await reader.ask(source)
            await reader.submit("urgent", OTHER, max_tokens=20, priority=0)
            await time.advance(0.001)
            await reader.submit("second", pulled=pulled, max_tokens=4, priority=1)
            await time.until(lambda: reader.finished("second") and reader.finished("urgent"))
            assert reader.tokens("second") == right()
            assert reader.tokens("urgent") == right(OTHER, 20)
            assert reader.idle


def events_of(party: Party, request_id: str) -> list[int]:
    return [kind for delta in party.deltas(request_id) for kind, _ in delta.events]


SOURCE_PROCESS = """
import asyncio, sys, time
from pathlib import Path
import msgspec
from dynamo_local.core.messages.kv import PinQuestion
from dynamo_local.core.messages.work import Submit
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings

async def main():
    settings = MockerSettings(mocker_kv_blocks=16, mocker_block_size=4)
    engine = MockerEngine(settings, Path(sys.argv[1]))
    await engine.start(lambda _: None)
    tokens = list(range(18))
    await engine.submit(Submit("r", 1, "f", tokens, msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1}))))
    await engine.step()
    prefix = engine.prefix(tokens, None, None)
    question = PinQuestion("p", prefix.fingerprint, prefix.hashes, 60.0)
    print(msgspec.msgpack.encode(await engine.pin(question)).hex(), flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def test_between_processes_until_the_source_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SOURCE_PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=PinAnswer)
        assert asyncio.run(pull_in_no_time(answer)) == (16, right())
        process.kill()
        process.wait()
        assert asyncio.run(pull_in_no_time(answer)) == (0, right())


async def pull_in_no_time(answer: PinAnswer) -> tuple[int | None, list[int]]:
    """Run by the real clock. Returns how many tokens were cached, and those generated."""
    instant = larger(transfer_base_ms=0.0, transfer_us_per_block=0.0, step_base_ms=0.0, prefill_us_per_token=0.0)
    reader = Party(MockerEngine(instant), SharedTime())
    prefix = reader.engine.prefix(PROMPT, None, None)
    assert prefix is not None
    await reader.submit("r", pulled=PulledPrefix("p", prefix.hashes, answer))
    while not reader.finished("r"):
        reader.steps.append(await reader.engine.step())
    return reader.cached("r"), reader.tokens("r")
