"""Watches for stalls of an engine: a hung engine ends its worker, an engine starved of CPU time is reported."""

from __future__ import annotations

import logging

from dynamo_local.bus.presence import Announcer
from dynamo_local.core.errors import EngineError
from dynamo_local.core.ports import Engine
from dynamo_local.core.process.stalls import StallClock, Verdict

_log = logging.getLogger(__name__)

STARVED = "its engine waits for CPU time that other processes have"
_LOOKED_AT_AFTER_S = 2.0
"""No engine is suspected that has made a step within this time."""
_LONGEST_LOOK_S = 2.0
"""Time counted between two looks at most. If more has passed, this process was starved, as the engine may have been."""


class StallWatch:
    """Watches one engine. It hangs if it has requests and a core, and makes no step for `limit_s`."""

    def __init__(self, announcer: Announcer, engine: Engine, limit_s: float) -> None:
        self._announcer = announcer
        self._engine = engine
        self._limit_s = limit_s
        self._clock = StallClock(limit_s, _LONGEST_LOOK_S)
        self._starved = False

    async def look(self, now: float, stepped_at: float, *, running: bool) -> None:
        """Judge the engine. To be called about once a second. Raises EngineError if the engine hangs."""
        verdict = Verdict.WELL
        if running and now - stepped_at > min(_LOOKED_AT_AFTER_S, self._limit_s):
            verdict = self._clock.look(now, stepped_at, await self._engine.waited_s())
        if verdict is Verdict.HUNG:
            raise EngineError(f"the engine has made no step for {self._limit_s:g} s, with requests to work on")
        self._tell(verdict is Verdict.STARVED)

    def _tell(self, starved: bool) -> None:
        if starved == self._starved:
            return
        self._starved = starved
        if starved:
            _log.warning("%s; it is not taken for hung", STARVED)
        self._announcer.update(detail=STARVED if starved else "")
