"""Pulls that come to nothing. Each ends in the right tokens, computed by the reader, and with nothing left over."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dynamo_local.core.ports import PulledPrefix

from .driving import deltas_of
from .two_engines import Party, right
from .virtual_time import SharedTime


class TestAPullThatFails:
    async def start(self, pair: list[Party], *, seconds: float = 10.0) -> PulledPrefix:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source, seconds=seconds)
        await reader.submit("second", pulled=pulled)
        await source.time.advance(0.05)
        assert not reader.deltas("second")
        return pulled

    async def check(self, reader: Party) -> None:
        await reader.time.until(lambda: reader.finished("second"))
        assert reader.tokens("second") == right()
        assert reader.cached("second") == 0
        assert reader.idle
        # What was read under another's time is not in the cache.
        assert await reader.run("third") == right()

    async def test_because_the_pin_ends_in_the_middle(self, pair: list[Party]) -> None:
        source, reader = pair
        await self.start(pair, seconds=0.1)
        await self.check(reader)
        assert source.idle

    async def test_because_the_pin_ends_in_the_very_moment(self, pair: list[Party], time: SharedTime) -> None:
        _, reader = pair
        await self.start(pair, seconds=0.140)
        await time.until(lambda: reader.finished("second"))
        assert (reader.cached("second"), reader.tokens("second")) == (0, right())

    async def test_because_the_time_is_over_before_it_begins(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source, seconds=0.1)
        await time.advance(0.1)
        begun = time.now
        await reader.submit("second", pulled=pulled)
        await self.check(reader)
        step = next(step for step in reader.steps if deltas_of([step], "second"))
        assert step.timestamp - reader.deltas("second")[0].events[1][1] == pytest.approx(begun)

    async def test_because_the_source_is_closed_in_the_middle(self, pair: list[Party]) -> None:
        source, reader = pair
        await self.start(pair)
        await source.engine.close(1.0)
        await self.check(reader)

    async def test_because_the_step_before_took_too_long(self, pair: list[Party], time: SharedTime) -> None:
        # The read is noticed to be over only after the step that was under way.
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source, seconds=0.145)
        await reader.submit("long", list(range(200, 230)), max_tokens=1)
        await time.advance(0.001)
        await reader.submit("second", pulled=pulled)
        await time.until(lambda: reader.finished("second"))
        assert (reader.cached("second"), reader.tokens("second")) == (0, right())

    async def test_because_the_handle_is_nonsense(self, pair: list[Party]) -> None:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source)
        nonsense = msgspec.structs.replace(pulled.answer, handle=msgspec.Raw(b"\xa3xyz"))
        await reader.submit("second", pulled=replace(pulled, answer=nonsense))
        await self.check(reader)

    async def test_because_it_is_cancelled(self, pair: list[Party], time: SharedTime) -> None:
        source, reader = pair
        await self.start(pair)
        await reader.cancel("second")
        await time.settle()
        assert reader.idle
        # Its blocks are given to somebody else before the read would have been over.
        others = {f"o{n}": list(range(60 * n, 60 * n + 30)) for n in (1, 2)}
        for name, token_ids in others.items():
            await reader.submit(name, token_ids, max_tokens=2)
        await time.advance(1.0)
        assert {name: reader.tokens(name) for name in others} == {n: right(t, 2) for n, t in others.items()}
        assert not reader.deltas("second")
        assert source.kept == 4

    async def test_because_its_request_is_given_up_while_it_waits_to_begin(
        self, pair: list[Party], time: SharedTime
    ) -> None:
        source, reader = pair
        await source.run("first")
        pulled = await reader.ask(source)
        # 14 of 16 blocks: there is no room for the pull.
        await reader.submit("long", list(range(200, 254)), max_tokens=2)
        await time.advance(0.001)
        await reader.submit("second", pulled=pulled)
        await reader.cancel("second")
        await time.until(lambda: reader.finished("long"))
        assert reader.tokens("long") == right(list(range(200, 254)), 2)
        await time.settle()
        assert reader.idle
