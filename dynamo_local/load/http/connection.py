"""HTTP/1.1 connections that cost little: one request at a time on each, and those that are free are used again.

An own client, since the base install has none, and because client and server often share a machine's cores here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.body import MAX_HEAD_BYTES, Body, Head, parse_head

IDLE_S = 2.0
"""A connection unused for longer is not used again: servers close them after 5 s and more, and a request must not
meet that."""

_MAX_REFUSAL_BYTES = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"

Sink = Callable[[bytes, float], None]
"""Takes a part of the body, and the time (`time.monotonic`) of its arrival. May raise ExchangeError."""


@dataclass(frozen=True)
class Answer:
    """The end of an exchange. The body of a status other than 200; the others went to the sink."""

    status: int
    body: bytes


class _Exchange(asyncio.Protocol):
    """A connection with these bounds."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._sink: Sink | None = None
        self._head: Head | None = None
        self._raw_head = bytearray()
        self._body: Body | None = None
        self._refusal = bytearray()
        self.is_reusable = True
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._head is not None and self._head.ends_with_connection and exc is None:
            self._finish()
        else:
            self._fail(ExchangeError("disconnected", f"the connection was lost: {exc or 'closed by the server'}"))

    async def exchange(self, request: bytes, sink: Sink) -> Answer:
        """Send, and wait for the end of the answer. Raises ExchangeError. Cancelled, it closes the connection."""
        assert self._transport is not None
        self._sink, self._head, self._body = sink, None, None
        self._done = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._done
        except (ExchangeError, asyncio.CancelledError):
            self.close()
            raise
        finally:
            self._sink = self._done = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._done is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._take(data, now)
        except ExchangeError as error:
            self._fail(error)
        except ValueError as error:
            self._fail(ExchangeError("bad answer", str(error)))

    def _take(self, data: bytes, now: float) -> None:
        if self._body is None:
            self._raw_head += data
            end = self._raw_head.find(_END_OF_HEAD)
            if end < 0:
                if len(self._raw_head) > MAX_HEAD_BYTES:
                    raise ValueError("an endless head")
                return
            self._head = parse_head(bytes(self._raw_head[:end]))
            data = bytes(self._raw_head[end + len(_END_OF_HEAD) :])
            self._raw_head.clear()
            self._body = Body(self._head)
        assert self._head is not None
        part = self._body.feed(data)
        if self._head.status != 200:
            self._refusal += part[: _MAX_REFUSAL_BYTES - len(self._refusal)]
        elif part and self._sink is not None:
            self._sink(part, now)
        if self._body.complete:
            self._finish()

    def _finish(self) -> None:
        assert self._head is not None
        self.is_reusable = self.is_reusable and self._head.keeps_alive
        if self._done is not None and not self._done.done():
            self._done.set_result(Answer(self._head.status, bytes(self._refusal)))
        self._refusal.clear()

    def _fail(self, error: ExchangeError) -> None:
        self.is_reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Connections:
    """All connections to one server."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, connect_timeout_s: float = 30.0) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Exchange] = []

    async def exchange(self, request: bytes, sink: Sink) -> Answer:
        """Send a request over a free connection, or a new one. Raises ExchangeError."""
        connection = self._free() or await self._open()
        answer = await connection.exchange(request, sink)
        if connection.is_reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close those that are free. The others close when what they do is cancelled."""
        while self._idle:
            self._idle.pop().close()

    def _free(self) -> _Exchange | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Exchange:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                loop = asyncio.get_running_loop()
                _, exchange = await loop.create_connection(_Exchange, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise ExchangeError("cannot connect", f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise ExchangeError("cannot connect", f"cannot connect: {error.strerror or error}") from error
        return exchange
