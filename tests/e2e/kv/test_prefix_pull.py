"""Prefix pull between real engines: the right tokens, whatever goes wrong, and every block given back.

Two engines, of which the source schedules two steps ahead, as vLLM does with asynchronous scheduling on GPUs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinQuestion
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.vllm.kv.pull.messages import Handle
from tests.e2e.kv.pull_engines import (
    BLOCK,
    BLOCKS,
    LONG_S,
    PATIENCE_S,
    SLOTS,
    Levers,
    PullEngine,
    make_reads_obey,
    make_steps_obey,
    prompt_of,
)

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARK_S = 60.0

SHORT_S = 1.5
"""A lease that ends while a test waits for it, and not before what it is for has begun."""


@pytest.fixture(scope="module")
def all_levers() -> Iterator[Levers]:
    levers = Levers()
    with pytest.MonkeyPatch.context() as patch:
        make_reads_obey(levers, patch.setattr)
        yield levers


@pytest.fixture
def levers(all_levers: Levers) -> Iterator[Levers]:
    yield all_levers
    all_levers.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    turn: str, all_levers: Levers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[PullEngine, PullEngine]]:
    from vllm.config import VllmConfig

    root = tmp_path_factory.mktemp("engines")
    source, reader = PullEngine("s", root / "source"), PullEngine("d", root / "reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "max_concurrent_batches", 2)
        make_steps_obey(all_levers, patch.setattr)
        await source.start()
    await reader.start()
    yield source, reader
    await asyncio.gather(source.close(), reader.close())


@pytest_asyncio.fixture(loop_scope="module")
async def source(engines: tuple[PullEngine, PullEngine]) -> AsyncIterator[PullEngine]:
    yield engines[0]
    await engines[0].settled()


@pytest_asyncio.fixture(loop_scope="module")
async def reader(engines: tuple[PullEngine, PullEngine], source: PullEngine) -> AsyncIterator[PullEngine]:
    yield engines[1]
    await engines[1].settled()


async def test_a_finished_prefill_is_held_and_continued_elsewhere(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(1001, seed=1)
    prefill = await source.submit(prompt, 1, hold_s=LONG_S)
    first = (await source.answer(prefill)).tokens
    full = len(prompt) // BLOCK
    await source.until(lambda: source.load is not None and source.load.kv_pinned == full / BLOCKS)
    assert source.load is not None
    assert (source.load.kv_usage, source.load.running) == (0.0, 0)
    # Memory pressure does not take what is held.
    await asyncio.gather(*(source.run(prompt_of(900, seed=seed), 1) for seed in range(10, 16)))

    pulled = await reader.ask(source, prompt + first)
    assert (pulled.answer.blocks, pulled.answer.refused) == (full, None)
    rest = await reader.run(prompt + first, 19, pulled)
    await source.engine.unpin([pulled.pin])
    await source.cancel(prefill)
    await source.settled()
    await source.until(lambda: source.load is not None and source.load.kv_pinned == 0.0)
    assert rest.cached == full * BLOCK
    expected = await source.run(prompt, 20)
    assert first + rest.tokens == expected.tokens


async def test_a_running_request_is_continued_elsewhere(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(700, seed=20)
    name = await source.submit(prompt, 200)
    so_far = (await source.answer(name, at_least=70)).tokens
    pulled = await reader.ask(source, prompt + so_far)
    # All blocks that were full, also those of the answer, and what is behind them: all but the last token.
    length = len(prompt) + len(so_far)
    assert (pulled.answer.blocks, pulled.answer.rest) == divmod(length - 1, BLOCK)
    rest = await reader.run(prompt + so_far, 200 - len(so_far), pulled)
    await source.engine.unpin([pulled.pin])
    assert so_far + rest.tokens == (await source.answer(name)).tokens
    assert rest.cached == length - 1


async def test_only_what_is_missing_is_read(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(1000, seed=25)
    expected = await source.run(prompt, 5)
    await reader.run(prompt[:330], 1)
    before = (await reader.counts()).blocks_read
    pulled = await reader.ask(source, prompt)
    assert pulled.answer.blocks == 31 - 10
    answer = await reader.run(prompt, 5, pulled)
    assert (answer.tokens, answer.cached) == (expected.tokens, 31 * BLOCK)
    await source.engine.unpin([pulled.pin])
    assert (await reader.counts()).blocks_read - before == 31 - 10
    again = reader.engine.prefix(prompt, None, None)
    assert again is not None
    assert await reader.engine.cached(again) == len(again.hashes) == 31


async def test_steps_tell_of_all_blocks_that_are_cached(source: PullEngine, reader: PullEngine) -> None:
    """Those computed, those read from another engine, those that were evicted for them, and that a park empties all."""
    prompts = [prompt_of(1000 + turn, seed=210 + turn) for turn in range(6)]
    for turn, prompt in enumerate(prompts):
        await source.run(prompt, 40)
        pulled = await reader.ask(source, prompt) if turn < 2 else None
        assert (await reader.run(prompt, 1, pulled)).cached == (0 if pulled is None else 31 * BLOCK)
        if pulled is not None:
            await source.engine.unpin([pulled.pin])
    await asyncio.gather(source.settled(), reader.settled())
    for engine in (source, reader):
        agreed = [await engine.agrees(prompt) for prompt in prompts]
        assert agreed[-1] == 31
        assert min(agreed) < 31, "nothing was evicted"
        assert len(engine.mirror.keys()) <= BLOCKS
        await engine.park()
        await engine.until(lambda mirror=engine.mirror: not mirror.keys())  # type: ignore[misc]
        await engine.engine.wake(PARK_S)
        await engine.run(prompts[0], 1)
        assert await engine.agrees(prompts[0]) == 31
        assert len(engine.mirror.keys()) == 31


async def test_what_is_scheduled_but_not_written_is_not_given_away(
    source: PullEngine, reader: PullEngine, levers: Levers
) -> None:
    prompt = prompt_of(1500, seed=30)
    levers.steps_are_slow = True
    name = await source.submit(prompt, 1)
    seen: dict[int, list[int]] = {}
    while 46 not in seen:
        pulled = await reader.ask(source, prompt)
        if pulled.answer.blocks:
            # Read at once: the next chunk of the prompt is on its way already.
            known = len(prompt) // BLOCK - len(pulled.hashes)
            blocks = known + pulled.answer.blocks
            seen[blocks] = (await reader.run(prompt[: blocks * BLOCK + 1], 4, pulled)).tokens
            await source.engine.unpin([pulled.pin])
    levers.clear()
    await source.answer(name)
    assert len(seen) > 1, "the prompt was not pinned while it was prefilled"
    for blocks, tokens in seen.items():
        assert (await source.run(prompt[: blocks * BLOCK + 1], 4)).tokens == tokens
    await source.counts_until(lambda counts: counts.scheduled_steps == counts.ended_steps)


async def test_pulls_to_and_from_parked_engines_are_right_once_they_wake(
    source: PullEngine, reader: PullEngine
) -> None:
    prompt = prompt_of(1000, seed=35)
    expected = await source.run(prompt, 5)
    for giver, taker in ((source, reader), (reader, source)):
        await taker.park()
        assert await taker.cached(prompt) == 0
        await taker.engine.wake(PARK_S)
        pulled = await taker.ask(giver, prompt)
        assert pulled.answer.blocks == 31
        with pytest.raises(EngineError, match="kept for readers"):
            await giver.engine.park(PARK_S)
        answer = await taker.run(prompt, 5, pulled)
        assert (answer.tokens, answer.cached) == (expected.tokens, 31 * BLOCK)
        await giver.engine.unpin([pulled.pin])
        await giver.settled()
    # What is computed over memory that was given back is as it was.
    await source.park()
    await source.engine.wake(PARK_S)
    again = await source.run(prompt, 5)
    assert (again.tokens, again.cached) == (expected.tokens, 0)


async def test_parking_gives_the_memory_of_the_kv_cache_back(source: PullEngine) -> None:
    assert source.engine._pull is not None
    size = source.engine._pull.block_bytes * BLOCKS
    grown: list[int] = []
    freed: list[int] = []
    for turn in range(5):
        await asyncio.gather(*(source.run(prompt_of(900, seed=100 * turn + seed), 1) for seed in range(4)))
        full = source.resident()
        await source.park()
        grown.append(source.resident())
        freed.append(full - grown[-1])
        await source.engine.wake(PARK_S)
    # Other memory of the engine comes and goes with the first requests.
    assert max(freed) > size // 2, f"{freed} of {size} bytes"
    assert grown[-1] - grown[1] < size // 4, f"{grown}: of {size} bytes"


async def test_an_engine_does_not_park_while_blocks_are_needed(
    source: PullEngine, reader: PullEngine, levers: Levers
) -> None:
    prompt = prompt_of(700, seed=36)
    running = await source.submit(prompt, 100)
    with pytest.raises(EngineError, match="has requests"):
        await source.engine.park(PARK_S)
    await source.answer(running)
    held = await source.submit(prompt, 1, hold_s=LONG_S)
    await source.answer(held)
    with pytest.raises(EngineError, match="kept for readers"):
        await source.park()
    await source.cancel(held)
    warm = await source.warm(prompt)
    with pytest.raises(EngineError, match="has requests"):
        await source.park()
    await source.cancel(warm)
    # A read that was given up and has not ended may still write to its blocks.
    await source.run(prompt, 1)
    levers.reads_do_not_end = True
    pulled = await reader.ask(source, prompt, lasts_s=SHORT_S)
    await reader.run(prompt, 1, pulled)
    with pytest.raises(EngineError, match=r"read into|kept for readers"):
        await reader.park()
    levers.clear()
    await reader.settled()
    await reader.park()
    await reader.engine.wake(PARK_S)


async def test_a_lease_that_is_over_is_not_read(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(500, seed=40)
    expected = await source.run(prompt, 5)
    pulled = await reader.ask(source, prompt, lasts_s=SHORT_S)
    assert pulled.answer.blocks
    await source.settled()
    answer = await reader.run(prompt, 5, pulled)
    assert (answer.tokens, answer.cached) == (expected.tokens, 0)


async def test_a_reader_slower_than_its_lease_reads_nothing_foreign(
    source: PullEngine, reader: PullEngine, levers: Levers
) -> None:
    prompt = prompt_of(900, seed=41)
    expected = await source.run(prompt, 5)
    levers.reads_wait = True
    pulled = await reader.ask(source, prompt, lasts_s=SHORT_S)
    name = await reader.submit(prompt, 5, pulled)
    await reader.counts_until(lambda counts: counts.reads == 1)
    # The source reuses these blocks as soon as it may.
    await source.settled()
    await asyncio.gather(*(source.run(prompt_of(900, seed=seed), 1) for seed in range(42, 48)))
    levers.clear()
    answer = await reader.answer(name)
    assert (answer.tokens, answer.cached) == (expected.tokens, 0)


async def test_a_read_that_does_not_end_holds_up_nobody(source: PullEngine, reader: PullEngine, levers: Levers) -> None:
    prompt = prompt_of(900, seed=50)
    expected = await source.run(prompt, 5)
    levers.reads_do_not_end = True
    pulled = await reader.ask(source, prompt, lasts_s=SHORT_S)
    answer = await reader.run(prompt, 5, pulled)
    assert time.monotonic() >= pulled.answer.until
    assert (answer.tokens, answer.cached) == (expected.tokens, 0)
    # It may still write to its blocks: they are nobody else's until it has ended.
    counts = await reader.counts_until(lambda counts: counts.used_blocks == counts.kept_blocks)
    assert (counts.kept_blocks, counts.leases) == (pulled.answer.blocks, 1)
    levers.clear()
    await reader.settled()


async def test_a_request_is_cancelled_while_it_is_pulled(
    source: PullEngine, reader: PullEngine, levers: Levers
) -> None:
    prompt = prompt_of(900, seed=60)
    await source.run(prompt, 1)
    levers.reads_do_not_end = True
    pulled = await reader.ask(source, prompt)
    name = await reader.submit(prompt, 5, pulled)
    await reader.counts_until(lambda counts: counts.reads == 1)
    await reader.cancel(name)
    await source.engine.unpin([pulled.pin])
    levers.clear()
    await reader.settled()


async def test_an_idle_source_takes_back_what_nobody_unpins(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(500, seed=70)
    source.most_pinned = 0.0
    held = await source.submit(prompt, 1, hold_s=SHORT_S)
    await source.answer(held)
    pulled = await reader.ask(source, prompt, lasts_s=SHORT_S)
    assert pulled.answer.blocks
    # Without a question: by what the engine tells of itself.
    await source.until(lambda: source.most_pinned > 0.0)
    await source.until(lambda: source.load is not None and source.load.kv_pinned == 0.0)
    assert time.monotonic() >= pulled.answer.until


async def test_who_means_something_else_pins_nothing(source: PullEngine, reader: PullEngine) -> None:
    prompt = prompt_of(500, seed=71)
    await source.run(prompt, 1)
    prefix = reader.engine.prefix(prompt, None, None)
    assert prefix is not None
    salted = reader.engine.prefix(prompt, "salt", None)
    assert salted is not None
    foreign = await source.engine.pin(PinQuestion("a", "another", prefix.hashes, LONG_S))
    private = await source.engine.pin(PinQuestion("b", prefix.fingerprint, salted.hashes, LONG_S))
    assert (foreign.blocks, private.blocks) == (0, 0)
    assert foreign.refused
    assert private.refused


@pytest.mark.parametrize("wrong", ["context", "engine", "the agent", "its blocks"])
async def test_an_answer_that_leads_nowhere_costs_time_only(source: PullEngine, reader: PullEngine, wrong: str) -> None:
    # The reader has these cached after each time.
    prompt = prompt_of(500, seed=100 + len(wrong))
    other = prompt_of(500, seed=110 + len(wrong))
    expected = await source.run(prompt, 5)
    await source.run(other, 1)
    pulled = await reader.ask(source, other if wrong == "context" else prompt)
    handle = msgspec.msgpack.decode(pulled.answer.handle, type=Handle)
    changed = {
        "context": handle,
        "engine": msgspec.structs.replace(handle, engine="nobody"),
        "the agent": msgspec.structs.replace(handle, engine="nobody", agents=(b"nothing",)),
        "its blocks": msgspec.structs.replace(handle, blocks=tuple(block + 10_000 for block in handle.blocks)),
    }[wrong]
    answer = msgspec.structs.replace(pulled.answer, handle=msgspec.Raw(msgspec.msgpack.encode(changed)))
    got = await reader.run(prompt, 5, PulledPrefix(pulled.pin, pulled.hashes, answer))
    await source.engine.unpin([pulled.pin])
    assert (got.tokens, got.cached) == (expected.tokens, 0)


async def test_preemption_at_both_sides(source: PullEngine, reader: PullEngine) -> None:
    """Six requests fit into an engine, and do no more when they have grown. They are moved meanwhile."""
    count = 8 * BLOCK
    prompts = [prompt_of(16 * BLOCK, seed=seed) for seed in range(80, 86)]
    names = [await source.submit(prompt, count) for prompt in prompts]
    so_far = [(await source.answer(name, at_least=40)).tokens for name in names]
    contexts = [prompt + tokens for prompt, tokens in zip(prompts, so_far, strict=True)]
    # The last of them are refused: no more than half of the blocks are kept for readers.
    pulls = [await reader.ask(source, context) for context in contexts]
    moved = [
        await reader.submit(context, len(prompts[0]) + count - len(context), pulled)
        for context, pulled in zip(contexts, pulls, strict=True)
    ]
    for name in moved:
        await reader.answer(name, at_least=1)
    await source.engine.unpin([pulled.pin for pulled in pulls])
    there = [await source.answer(name) for name in names]
    here = [await reader.answer(name) for name in moved]
    for begun, rest, whole in zip(so_far, here, there, strict=True):
        assert begun + rest.tokens == whole.tokens
    assert any(answer.preempted for answer in there)
    assert any(answer.preempted for answer in here)
    assert [bool(answer.cached) for answer in here] == [pulled.answer.blocks > 0 for pulled in pulls]
    assert 0 < sum(pulled.answer.blocks for pulled in pulls) <= BLOCKS // 2


async def test_urgent_requests_are_admitted_first(reader: PullEngine) -> None:
    """Beside the first, none of the others fits."""
    running = await reader.submit(prompt_of(90 * BLOCK, seed=200), 40)
    await reader.answer(running, at_least=1)
    plain = await reader.submit(prompt_of(60 * BLOCK, seed=201), 1)
    urgent = await reader.submit(prompt_of(60 * BLOCK, seed=202), 1, priority=-1)
    await reader.answer(urgent)
    assert not reader.has_begun(plain)
    await reader.answer(plain)


async def test_a_source_that_dies(source: PullEngine, reader: PullEngine, levers: Levers, tmp_path: Path) -> None:
    """A reader has read from the source before, and is about to again. The other one does not know it."""
    victim = PullEngine("v", tmp_path / "victim")
    await victim.start()
    try:
        prompts = [prompt_of(600, seed=seed) for seed in (90, 91, 92)]
        expected = [await victim.run(prompt, 5) for prompt in prompts]
        first = await reader.run(prompts[0], 5, await reader.ask(victim, prompts[0]))
        assert (first.tokens, first.cached) == (expected[0].tokens, 18 * BLOCK)
        known, unknown = (
            await reader.ask(victim, prompts[1], lasts_s=2 * PATIENCE_S),
            await source.ask(victim, prompts[2], lasts_s=2 * PATIENCE_S),
        )
        assert known.answer.blocks == unknown.answer.blocks == 18
        levers.reads_wait = True
        name = await reader.submit(prompts[1], 5, known)
        await reader.counts_until(lambda counts: counts.reads == 1)
        victim.kill()
        levers.clear()
        # That it has died is noticed: its leases last longer than an answer is waited for.
        answers = [await reader.answer(name), await source.run(prompts[2], 5, unknown)]
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected[1:]]
        assert [answer.cached for answer in answers] == [0, 0]
    finally:
        await victim.close()


@pytest.mark.parametrize("which", [0, 1], ids=["two steps ahead", "one step at a time"])
async def test_requests_grow_from_what_is_warm(engines: tuple[PullEngine, PullEngine], which: int) -> None:
    engine, other = engines[which], engines[1 - which]
    prompt = prompt_of(700, seed=70 + which)
    expected = (await other.run(prompt, 40)).tokens
    first = await engine.warm(prompt)
    await engine.until(lambda: engine.load is not None and (engine.load.running, engine.load.waiting) == (0, 0))
    second = await engine.grow(prompt + expected[:5], 1, first, warm=True)
    assert second is not None
    assert (await engine.answer(second)).finish == "length"
    # What has been grown from is nobody's any more.
    assert await engine.grow(prompt + expected[:6], 1, first) is None
    await engine.cancel(first)
    third = await engine.grow(prompt + expected[:8], 32, second)
    assert third is not None
    rest = await engine.answer(third)
    assert (rest.tokens, rest.finish) == (expected[8:], "length")
    await asyncio.gather(engine.settled(), other.settled())


async def test_what_is_warm_or_grows_is_gone_when_it_is_cancelled(reader: PullEngine) -> None:
    prompt = prompt_of(100, seed=80)
    await reader.cancel(await reader.warm(prompt))
    await reader.settled()
    warm = await reader.warm(prompt)
    await reader.cancel(warm)
    assert await reader.grow([*prompt, 1], 5, warm) is None
    grown = await reader.grow([*prompt, 1, 2], 2000, await reader.warm(prompt))
    assert grown is not None
    await reader.answer(grown, at_least=3)
    await reader.cancel(grown)


@pytest.mark.parametrize("which", [0, 1], ids=["two steps ahead", "one step at a time"])
async def test_an_urgent_request_takes_a_slot(engines: tuple[PullEngine, PullEngine], which: int) -> None:
    engine, other = engines[which], engines[1 - which]
    prompts = [prompt_of(40, seed=1_000 + number) for number in range(SLOTS)]
    hurried = prompt_of(40, seed=2_000)
    names = [await engine.submit(prompt, 60) for prompt in prompts]
    for name in names:
        await engine.answer(name, at_least=1)
    urgent = await engine.answer(await engine.submit(hurried, 2, priority=-1))
    assert not any(engine.is_over(name) for name in names), "it waited until another one had ended"
    answers = await asyncio.gather(*(engine.answer(name) for name in names))
    assert sum(answer.preempted for answer in answers) == 1
    expected = await asyncio.gather(*(other.run(prompt, 60) for prompt in prompts), other.run(hurried, 2))
    assert [answer.tokens for answer in (*answers, urgent)] == [answer.tokens for answer in expected]
    await asyncio.gather(engine.settled(), other.settled())
