"""Exchanges a process's connection to NATS for one by another token, without losing a request of this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import nats.errors
from nats.aio.client import Client
from nats.protocol.command import unsub_cmd

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import BusError, NobodyListensError

_log = logging.getLogger(__name__)

_AGAIN_S = 0.05
"""Between two requests where nobody listens who may be back in a moment."""
_READ_WITHIN_S = 1.0
_PATIENCE_S = 1.0
"""Longest wait for requests under way to get their answers, while others begin."""
_DELAY_S = 0.25
"""Longest delay of requests that begin, for those under way to get their answers."""
_FLUSH_S = 2
_RECONNECT_S = 5.0
_OTHERS_EXCHANGE_S = 10.0
"""For so long after the address has changed, other processes may be disconnected for a moment."""


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


class KnownAddress:
    """An address that is read anew from `path`, if there is one, when it is asked for."""

    def __init__(self, address: BusAddress, path: Path | None = None) -> None:
        self.current = address
        self._path = path
        self._reading: asyncio.Task[BusAddress] | None = None

    async def read_again(self) -> bool:
        """Read the file, and return whether the address has changed. One that cannot be read within a second has not:
        it is read on, and found the next time."""
        if self._path is None:
            return False
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(BusAddress.load, self._path), name="address of NATS")
        reading = self._reading
        await asyncio.wait({reading}, timeout=_READ_WITHIN_S)
        if not reading.done():
            return False
        self._reading = None
        before = self.current
        with suppress(BusError):
            self.current = reading.result()
        return self.current != before


class Exchange:
    """What the client presents to the server, now and whenever it connects again.

    Its callbacks `user` and `token` are called by the client as it connects; `reconnected` is to be set then.
    """

    def __init__(self, client: Client, known: KnownAddress, asks: Asks) -> None:
        self._client = client
        self._known = known
        self._asks = asks
        self._presented = known.current
        self._lock = asyncio.Lock()
        self.reconnected = asyncio.Event()
        self.is_under_way = False

    def user(self) -> str:
        return self._known.current.user or ""

    def token(self) -> str:
        self._presented = self._known.current
        return self._presented.token or ""

    async def renew(self) -> str | None:
        """Read the address anew, and connect by it if it has changed. Returns the user of this connection.

        While the server is away the client tries to connect, by the new address, and this returns after a while.
        """
        self._asks.excuse(_OTHERS_EXCHANGE_S)
        async with self._lock:
            await self._known.read_again()
            if self._presented != self._known.current:
                await self._exchange()
            return self._presented.user

    async def _exchange(self) -> None:
        self.is_under_way = True
        try:
            async with self._asks.paused(_PATIENCE_S, _DELAY_S):
                if self._presented != self._known.current:
                    await self._reconnect()
        except TimeoutError:
            _log.warning("NATS does not answer by its new token yet; this process goes on trying")
        finally:
            self.is_under_way = False

    async def _reconnect(self) -> None:
        self.reconnected.clear()
        if self._client.is_connected:
            with suppress(nats.errors.Error, OSError):
                await self._stop_hearing()
            await self._client.force_reconnect()
        async with asyncio.timeout(_RECONNECT_S):
            await self.reconnected.wait()

    async def _stop_hearing(self) -> None:
        """Have the server send nothing more, and read what it has sent. Then a request of another process, which would
        be lost with the connection, finds nobody who listens, and is sent again. The client subscribes anew by itself
        when it has connected."""
        transport = self._client._transport
        if transport is None:
            return
        for subscription in tuple(self._client._subs):
            # Not by the client's buffer: if the connection is lost now, what is left there is sent by the next one.
            transport.write(unsub_cmd(subscription, 0))
        # Twice, as Bus.flush does.
        await self._client.flush(_FLUSH_S)
        await self._client.flush(_FLUSH_S)
