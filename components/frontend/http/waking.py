"""Asks the server to wake an endpoint while requests are held for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from components.frontend.http.generations.held import Line
from dynamo_local.core.errors import NotRunningError, UnansweredError
from dynamo_local.core.http.waiting.holding import Unready
from dynamo_local.core.http.waiting.waking import AGAIN_S, Asking, Idle, judged
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)


class WakeableEndpoint(Protocol):
    """An endpoint as this frontend knows it."""

    name: str

    def idle(self) -> Idle | None:
        """How it is idle; None: it is not."""

    def lacks_workers(self) -> bool:
        """Whether a request that was not held, or is not any more, waits for a worker."""

    def is_waking(self) -> bool:
        """Whether it comes up for those who ask for it."""

    def may_be_tried(self) -> bool:
        """Whether it has failed to wake, and may be tried again."""

    async def wake(self) -> str:
        """Ask the server once to wake it. Returns why it refuses; empty: it does not. Raises NotRunningError,
        UnansweredError."""


Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]]


class Waking:
    """The waking of one endpoint. `lines`: the requests that are held for it, those for its adapters included."""

    def __init__(
        self,
        endpoint: WakeableEndpoint,
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines: WeakSet[Line] = WeakSet()
        self._endpoint = endpoint
        self._spawn = spawn
        self._clock = clock
        self._asking = Asking()
        self._was: Idle | None = None
        self._knocked = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._log_once = LogOnce(_log)

    @property
    def is_idle(self) -> bool:
        """Whether the endpoint gets a worker by being asked for."""
        return self._endpoint.idle() is not None

    @property
    def woken_from(self) -> Idle | None:
        """How the endpoint is idle, or was until it began to wake."""
        return self._endpoint.idle() or self._was

    def look(self) -> None:
        """Ask if a request waits for the endpoint, and that helps. To be called whenever that may have changed."""
        idle = self._endpoint.idle()
        if idle is not None or not self._endpoint.is_waking():
            self._was = idle
        if self._task is not None:
            self._changed.set()
        elif self._needed():
            self._begin()

    def knock(self) -> None:
        """Ask once, for a request that cannot be held as it is."""
        if self._concerned() and self._asking.outcome != "asked" and not self._asking.is_recent(self._clock()):
            self._knocked = True
            # Whoever looks before the task does is to know.
            self._asking = self._asking.begun(self._clock())
            self._changed.set()
            if self._task is None:
                self._begin()

    def judged(self, unready: Unready) -> Unready:
        """What those are told who wait. `unready`: as it is without what the server has answered."""
        return judged(unready, self._asking, self._clock()) if self._concerned() else unready

    def _concerned(self) -> bool:
        return self._endpoint.idle() is not None or self._endpoint.may_be_tried()

    def _needed(self) -> bool:
        if not self._knocked and not any(map(len, self.lines)) and not self._endpoint.lacks_workers():
            return False
        return self._knocked or self._endpoint.idle() is not None or self._endpoint.is_waking()

    def _begin(self) -> None:
        self._task = self._spawn(f"waking {self._endpoint.name}", self._run())

    async def _run(self) -> None:
        try:
            while self._needed():
                self._knocked = False
                await self._ask_once()
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        while self._needed() and not self._knocked:
                            self._changed.clear()
                            await self._changed.wait()
        finally:
            self._task = None

    async def _ask_once(self) -> None:
        self._asking = self._asking.begun(self._clock())
        try:
            refused = await self._endpoint.wake()
        except (NotRunningError, UnansweredError) as error:
            why = f"the server does not answer this frontend: {error.cause}"
            self._asking = self._asking.unanswered(why, self._clock())
            self._log_once.warn(f"endpoint {self._endpoint.name} is not woken yet: {why}")
        else:
            self._asking = self._asking.answered(refused, self._clock())
            self._log_once.clear()
            if not refused:
                _log.info("endpoint %s was asked for, and is to wake", self._endpoint.name)
            else:
                _log.warning("endpoint %s is not woken: %s", self._endpoint.name, self._asking.why)
        for line in self.lines:
            line.wake()
