"""Time that passes only in sleeps, and at once."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable


class VirtualTime:
    """`clock` and `sleep` of an engine. Every sleep is recorded."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds
        self.slept.append(seconds)


class StoppedTime(VirtualTime):
    """Sleeps last until `release` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = asyncio.Event()
        self._released = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asleep.set()
        await self._released.wait()
        await super().sleep(seconds)

    def release(self) -> None:
        self._released.set()


class SharedTime:
    """Clock of several engines, whose sleepers wake in order and only when a test lets time pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._slept = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        self._slept += 1
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, self._slept, woken))
        await woken

    async def settle(self) -> None:
        """Let everybody do what can be done without time."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        until = self.now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            await self._wake_next()
        self.now = until
        await self.settle()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until something is so."""
        await self.settle()
        while not condition():
            assert self._sleepers, "it will never be so: nobody waits for anything"
            await self._wake_next()

    async def _wake_next(self) -> None:
        self.now, _, woken = heapq.heappop(self._sleepers)
        if not woken.done():
            woken.set_result(None)
            await self.settle()


_TURNS = 20
"""Turns of the loop that are enough for any engine to come to rest."""
