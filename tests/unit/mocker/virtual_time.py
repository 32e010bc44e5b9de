"""Time that passes only in sleeps, and at once."""

from __future__ import annotations

import asyncio


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
