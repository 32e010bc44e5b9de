"""Parking of a worker: its engine is paused and gives its memory back, while process and device stay as they are.

A parked worker announces the state "parked" and no load; the router assigns it nothing. A request that reaches it all
the same, because it was sent before that was known, wakes it. Its KV cache is empty: who asks what is cached, or wants
blocks to be kept, is told that there is nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_local.bus.presence import Announcer
from dynamo_local.core.errors import EngineError
from dynamo_local.core.ports import Engine

_log = logging.getLogger(__name__)

PARK_S = 60.0
"""Deadline of an engine that parks. On a GPU it copies its weights."""

WAKE_S = 60.0
"""Deadline of an engine that wakes. The worker ends with an error then."""

WhyNot = Callable[[], str | None]
"""Says why the worker must not park now; None if it may."""


class Parking:
    """Parks and wakes the engine of one worker, one thing at a time."""

    def __init__(self, announcer: Announcer, engine: Engine) -> None:
        self._announcer = announcer
        self._engine = engine
        self._changing = asyncio.Lock()
        self._resting = False
        self._wanted = 0
        """Number of callers that wait for the engine to be awake."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def resting(self) -> bool:
        """Whether the engine is parked, or on its way there or back: it may be used after `wake` only."""
        return self._resting

    def on_wake(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the engine has woken, or has not parked after all."""
        self._listeners.append(listener)

    async def park(self, why_not: WhyNot) -> str | None:
        """Park, unless `why_not` or the engine refuses, or somebody calls `wake` meanwhile. Returns the reason, or None
        once the worker is parked.

        From the call of `why_not` to that of the engine nothing is awaited: what comes after finds `resting` set.
        Raises EngineError if the engine does not come back from an attempt that failed.
        """
        async with self._changing:
            if self._resting:
                return None
            if (refused := why_not()) is not None:
                return refused
            self._resting = True
            try:
                await self._engine.park(PARK_S)
            except EngineError as error:
                await self._rouse()
                return str(error)
            if self._wanted:
                await self._rouse()
                return "it is needed again"
            if self._announcer.presence.state == "ready":
                self._announcer.update(state="parked", detail="", load=None)
            _log.info("parked: the KV cache is empty, and its memory given back")
            return None

    async def wake(self) -> None:
        """Return when the engine may be used. Raises EngineError if it does not wake."""
        if not self._resting:
            return
        self._wanted += 1
        try:
            async with self._changing:
                if self._resting:
                    await self._rouse()
        finally:
            self._wanted -= 1

    async def _rouse(self) -> None:
        await self._engine.wake(WAKE_S)
        self._resting = False
        # Not over "draining" or "failed".
        if self._announcer.presence.state == "parked":
            self._announcer.update(state="ready")
            _log.info("awake again")
        for listener in self._listeners:
            listener()
