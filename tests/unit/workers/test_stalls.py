"""An engine that hangs ends its worker; of one that is starved the worker tells, and waits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from components.workers.engine_service import STARVED, StallWatch
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.ports import Engine
from dynamo_local.core.subjects import Subjects

STEPPED_AT = 100.0
LIMIT_S = 5.0


class Waiting:
    """An engine of which only one thing is asked."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.asked = 0

    async def waited_s(self) -> float:
        self.asked += 1
        return self.waited


class Watched:
    """A stall watch that looks every second."""

    def __init__(self) -> None:
        presence = Presence("ns_Worker", "Worker", "aggregated", "w1", 1, "ready")
        self.announcer = Announcer(cast(Any, None), Subjects("ns"), presence)
        self.engine = Waiting()
        self._watch = StallWatch(self.announcer, cast(Engine, self.engine), LIMIT_S)

    async def look(self, second: int, *, waits: float = 0.0, running: bool = True) -> str:
        """Returns what its presence says."""
        self.engine.waited += waits
        await self._watch.look(STEPPED_AT + second, STEPPED_AT, running=running)
        return self.announcer.presence.detail

    async def look_on(self, seconds: range, *, waits: float = 0.0) -> list[str]:
        return [await self.look(second, waits=waits) for second in seconds]


async def test_an_engine_that_hangs_is_noticed() -> None:
    watched = Watched()
    with pytest.raises(EngineError, match="no step for 5 s"):
        await watched.look_on(range(1, 10))


async def test_an_engine_that_is_starved_is_told_of_and_kept() -> None:
    watched = Watched()
    details = await watched.look_on(range(1, 300), waits=0.95)
    assert details[:3] == [""] * 3
    assert set(details[3:]) == {STARVED}


async def test_that_it_is_starved_is_told_until_it_steps_or_has_nothing_to_do() -> None:
    watched = Watched()
    await watched.look_on(range(1, 10), waits=0.95)
    assert await watched.look(10, running=False) == ""


async def test_an_engine_that_hangs_when_it_has_a_core_again_is_noticed() -> None:
    watched = Watched()
    await watched.look_on(range(1, 100), waits=0.95)
    with pytest.raises(EngineError):
        await watched.look_on(range(100, 110))


async def test_an_engine_that_steps_is_not_asked() -> None:
    watched = Watched()
    await watched.look(1)
    await watched.look(50, running=False)
    assert watched.engine.asked == 0
