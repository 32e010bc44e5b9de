"""The requests of one connection that wait for their answers, so that the connection can be exchanged between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from dynamo_local.core.errors import BusError, NobodyListensError

_AGAIN_S = 0.05


class Asks:
    """Requests under way. None begins while they are paused."""

    def __init__(self) -> None:
        self._under_way = 0
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._none = asyncio.Event()
        self._none.set()
        self._others_return_by = 0.0

    async def run(self, ask: Callable[[float], Awaitable[bytes]], timeout_s: float) -> bytes:
        """Ask with the time that is left, in seconds, as soon as that may begin. While others may be away (`excuse`),
        ask again where nobody listens. Raises BusError as `ask`."""
        ends = time.monotonic() + timeout_s
        while True:
            await self._allowed(ends - time.monotonic())
            try:
                return await self._counted(ask(ends - time.monotonic()))
            except NobodyListensError:
                if time.monotonic() + _AGAIN_S > min(self._others_return_by, ends):
                    raise
            await asyncio.sleep(_AGAIN_S)

    def excuse(self, seconds: float) -> None:
        """For so long, others may be away for a moment each: nobody who listens does not mean that there is nobody."""
        self._others_return_by = time.monotonic() + seconds

    @asynccontextmanager
    async def paused(self, patience_s: float, delay_s: float) -> AsyncIterator[None]:
        """Have no request begin as long as the context lasts. Those under way may end before: they are waited for
        `patience_s` while others begin, then `delay_s` while none does. What takes longer still goes on."""
        await self._ended(patience_s)
        self._may_begin.clear()
        try:
            await self._ended(delay_s)
            yield
        finally:
            self._may_begin.set()

    async def _allowed(self, within_s: float) -> None:
        if self._may_begin.is_set():
            return
        try:
            async with asyncio.timeout(within_s):
                await self._may_begin.wait()
        except TimeoutError as error:
            raise BusError("the connection to NATS is being exchanged") from error

    async def _counted(self, answer: Awaitable[bytes]) -> bytes:
        self._under_way += 1
        self._none.clear()
        try:
            return await answer
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._none.set()

    async def _ended(self, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._none.wait()
