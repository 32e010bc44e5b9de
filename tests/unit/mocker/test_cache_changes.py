"""What the mocker's steps tell of its cache is what it answers when it is asked."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core.routing.caches.index import key_of
from dynamo_local.core.routing.caches.mirror import CacheMirror

from .two_engines import PROMPT, Party, larger, parties
from .virtual_time import SharedTime

OTHER = [*PROMPT[:8], *range(100, 114)]
"""Shares two blocks with PROMPT."""


def mirrored(party: Party) -> CacheMirror:
    mirror = CacheMirror("w")
    for step in party.steps:
        if step.cache is not None:
            mirror.apply(step.cache)
    return mirror


async def agrees(party: Party, tokens: list[int]) -> int:
    """The number of a prompt's cached blocks, by both."""
    prefix = party.engine.prefix(tokens, None, None)
    assert prefix is not None
    mirror = mirrored(party)
    cached = await party.engine.cached(prefix)
    known = [key_of(block_hash) in mirror for block_hash in prefix.hashes]
    assert known[:cached] == [True] * cached
    assert not any(known[cached : cached + 1])
    return cached


async def test_steps_tell_what_is_cached(pair: list[Party]) -> None:
    engine, _ = pair
    await engine.run("one", max_tokens=8)
    assert await agrees(engine, PROMPT) == 4
    # Its own output is in blocks as well: 18 + 8 tokens, the last of which is not computed.
    assert len(mirrored(engine).keys()) == 6
    assert await agrees(engine, OTHER) == 2
    await engine.run("other", OTHER)
    assert await agrees(engine, OTHER) == 5


async def test_what_was_pulled_is_told_of(pair: list[Party]) -> None:
    source, reader = pair
    await source.run("source")
    await reader.run("reader", pulled=await reader.ask(source))
    assert reader.cached("reader") == 16
    assert await agrees(reader, PROMPT) == 4


async def test_a_parked_engine_tells_at_once_that_nothing_is_cached(pair: list[Party], time: SharedTime) -> None:
    engine, _ = pair
    await engine.run("one")
    await engine.engine.park(1.0)
    await time.until(lambda: not mirrored(engine).keys())
    assert engine.steps[-1].cache is not None
    assert (engine.steps[-1].deltas, engine.steps[-1].cache.cleared) == ((), True)
    await engine.engine.wake(1.0)
    await engine.run("two")
    assert await agrees(engine, PROMPT) == 4


async def test_evicted_blocks_are_told_of(time: SharedTime, tmp_path: Path) -> None:
    async with parties(time, tmp_path, larger(kv_blocks=7)) as (engine,):
        for turn in range(4):
            prompt = [*PROMPT[: 4 * turn], *range(20 * turn + 50, 20 * turn + 68 - 4 * turn)]
            await engine.run(f"turn {turn}", prompt)
            assert await agrees(engine, prompt) == 4
            assert len(mirrored(engine).keys()) <= 7


async def test_an_engine_without_prefix_caching_tells_nothing(time: SharedTime, tmp_path: Path) -> None:
    async with parties(time, tmp_path, larger(prefix_caching=False)) as (engine,):
        await engine.run("one")
        await engine.engine.park(1.0)
        await time.settle()
        assert all(step.cache is None for step in engine.steps)
