"""Parking: what keeps an engine from it, and what is left of its cache."""

from __future__ import annotations

import pytest

from dynamo_local.core.errors import EngineError, RequestError

from .driving import work
from .two_engines import PROMPT, Party, right
from .virtual_time import SharedTime


async def cached_of(party: Party) -> int:
    prefix = party.engine.prefix(PROMPT, None, None)
    assert prefix is not None
    return await party.engine.cached(prefix)


async def test_a_parked_engine_has_nothing_cached_and_computes_the_same_when_awake(pair: list[Party]) -> None:
    engine, _ = pair
    assert await engine.run("before") == right()
    assert await cached_of(engine) == 4
    await engine.engine.park(1.0)
    assert await cached_of(engine) == 0
    with pytest.raises(RequestError, match="parked"):
        await engine.engine.submit(work("early"))
    await engine.engine.wake(1.0)
    assert await engine.run("after") == right()
    assert (engine.cached("after"), await cached_of(engine)) == (0, 4)


async def test_it_does_not_park_while_it_has_requests_or_readers(pair: list[Party], time: SharedTime) -> None:
    source, reader = pair
    await source.submit("running")
    with pytest.raises(EngineError, match="has requests"):
        await source.engine.park(1.0)
    await time.until(lambda: source.finished("running"))
    pulled = await reader.ask(source, seconds=30.0)
    with pytest.raises(EngineError, match="kept for readers"):
        await source.engine.park(1.0)
    assert await reader.run("reading", pulled=pulled) == right()
    assert reader.cached("reading") == 16
    await source.engine.unpin([pulled.pin])
    await source.engine.park(1.0)


async def test_a_cancelled_request_is_waited_for_as_long_as_its_step_may_write(
    pair: list[Party], time: SharedTime
) -> None:
    engine, _ = pair
    await engine.submit("gone")
    await time.settle()
    await engine.cancel("gone")
    with pytest.raises(EngineError, match="has requests"):
        await engine.engine.park(1.0)
    await time.advance(1.0)
    await engine.engine.park(1.0)


async def test_pulls_to_and_from_a_woken_engine_are_right(pair: list[Party]) -> None:
    one, other = pair
    for turn, (source, reader) in enumerate(((one, other), (other, one))):
        assert await source.run(f"warms {turn}") == right()
        await reader.engine.park(1.0)
        await reader.engine.wake(1.0)
        pulled = await reader.ask(source)
        assert await reader.run(f"reads {turn}", pulled=pulled) == right()
        assert reader.cached(f"reads {turn}") == 16
        await source.engine.unpin([pulled.pin])
        await source.engine.park(1.0)
        await source.engine.wake(1.0)


async def test_a_reader_that_comes_too_late_gets_no_blocks_of_zeros(pair: list[Party]) -> None:
    """Its pin is over, though it has not noticed; the source parks, and the memory has another content."""
    source, reader = pair
    await source.run("first")
    pulled = await reader.ask(source, seconds=5.0)
    await source.time.advance(5.0)
    await source.engine.park(1.0)
    assert await reader.run("second", pulled=pulled) == right()
    assert reader.cached("second") == 0


async def test_a_thousand_turns_leave_no_block(pair: list[Party]) -> None:
    engine, _ = pair
    for turn in range(1000):
        await engine.engine.park(1.0)
        await engine.engine.wake(1.0)
        if turn % 100 == 0:
            assert await engine.run(f"after {turn}") == right()
    await engine.engine.park(1.0)
    pool = engine.engine._scheduler.pool
    assert (pool.free, len(engine.engine._scheduler.leases)) == (pool.total, 0)
