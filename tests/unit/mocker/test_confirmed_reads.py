"""Reads from another machine: they count once they are confirmed, and are computed otherwise."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dynamo_local.core.ports import PulledPrefix

from .two_engines import PROMPT, Party, right
from .virtual_time import SharedTime


async def begin(pair: list[Party], *, seconds: float = 100.0) -> PulledPrefix:
    """Have the reader begin to read what the source has."""
    source, reader = pair
    await source.run("first")
    pulled = replace(await reader.ask(source, seconds=seconds), to_confirm=True)
    await reader.submit("second", pulled=pulled)
    return pulled


async def finish(reader: Party, cached: int) -> None:
    await reader.time.until(lambda: reader.finished("second"))
    assert (reader.tokens("second"), reader.cached("second")) == (right(), cached)


async def read(reader: Party, pulled: PulledPrefix) -> None:
    """Until it has been read."""
    asking = asyncio.create_task(reader.engine.read_ended(pulled.pin))
    await reader.time.advance(1.0)
    assert asking.done()
    assert await asking


async def test_what_is_confirmed_counts(pair: list[Party]) -> None:
    source, reader = pair
    pulled = await begin(pair)
    await read(reader, pulled)
    assert not reader.deltas("second")
    await reader.engine.settle_read(pulled.pin, held=await source.engine.confirm(pulled.pin))
    await finish(reader, 16)
    assert not await source.engine.confirm(pulled.pin)


async def test_what_was_reused_is_computed(pair: list[Party]) -> None:
    """The source gives its pin up, and fills its blocks with something else, before anything is read."""
    source, reader = pair
    pulled = await begin(pair)
    await source.engine.unpin([pulled.pin])
    await source.run("other", list(range(100, 155)), max_tokens=1)
    await read(reader, pulled)
    await reader.engine.settle_read(pulled.pin, held=await source.engine.confirm(pulled.pin))
    await finish(reader, 0)
    assert await reader.run("third") == right()


async def test_without_confirmation_it_would_be_wrong(pair: list[Party]) -> None:
    """That the test before would see it."""
    source, reader = pair
    pulled = await begin(pair)
    await source.engine.unpin([pulled.pin])
    await source.run("other", list(range(100, 155)), max_tokens=1)
    await read(reader, pulled)
    await reader.engine.settle_read(pulled.pin, held=True)
    await reader.time.until(lambda: reader.finished("second"))
    assert reader.tokens("second") != right()


async def test_a_word_before_the_read_does_not_make_it_count(pair: list[Party]) -> None:
    _, reader = pair
    pulled = await begin(pair)
    await reader.time.advance(0.05)
    await reader.engine.settle_read(pulled.pin, held=True)
    await finish(reader, 0)


async def test_a_read_that_nobody_settles_is_computed_in_the_end(pair: list[Party], time: SharedTime) -> None:
    _, reader = pair
    pulled = await begin(pair, seconds=5.0)
    await read(reader, pulled)
    await finish(reader, 0)
    assert time.now >= pulled.answer.until


async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(pair: list[Party]) -> None:
    source, reader = pair
    pulled = await begin(pair)
    await read(reader, pulled)
    await reader.cancel("second")
    await reader.engine.settle_read(pulled.pin, held=await source.engine.confirm(pulled.pin))
    assert await reader.run("third", PROMPT) == right()
    await reader.time.until(lambda: reader.idle and source.idle)
