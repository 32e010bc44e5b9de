"""Exchanges a process's connection to NATS for one by another token, without losing a request of this process."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import nats.errors
from nats.aio.client import Client
from nats.protocol.command import unsub_cmd

from dynamo_local.bus.asks import Asks
from dynamo_local.bus.known_address import KnownAddress

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Longest wait for requests under way to get their answers, while others begin."""
_DELAY_S = 0.25
"""Longest delay of requests that begin, for those under way to get their answers."""
_FLUSH_S = 2
_RECONNECT_S = 5.0
OTHERS_EXCHANGE_S = 10.0
"""For so long after the address has changed, other processes may be disconnected for a moment."""


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
        self._asks.excuse(OTHERS_EXCHANGE_S)
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
