"""A small HTTP/1.1 client: one request at a time on each connection, and free connections are reused.

The base install has no HTTP client, and this one uses little CPU, which matters where client and server share cores.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from dynamo_local.core.errors import DynamoError

# Errors of a load, and of its single requests.


class LoadError(DynamoError):
    """The endpoint cannot be loaded: it does not answer, or not like an OpenAI API."""


class ExchangeError(LoadError):
    """A request got no complete answer. It is counted under `kind`, and the load goes on."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind


# The wire format of an answer: HTTP/1.1 heads and bodies (RFC 9112), and server-sent events in them.

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Head:
    """The fields of an answer's head that describe its body."""

    status: int
    length: int | None
    """Length of the body in bytes, if the head has it."""
    chunked: bool
    keeps_alive: bool

    @property
    def ends_with_connection(self) -> bool:
        return not self.chunked and self.length is None


def parse_head(raw: bytes) -> Head:
    """Parse the head of an answer. Raises ValueError."""
    status_line, *lines = raw.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"not HTTP/1.1: {status_line[:60]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    connection = headers.get("connection", "").lower()
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    length = None if chunked or "content-length" not in headers else int(headers["content-length"])
    if int(rest[:3]) in (204, 304):
        length, chunked = 0, False
    keeps = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
    return Head(int(rest[:3]), length, chunked, keeps)


class Body:
    """Decodes the bytes after a head into those of the body."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._left = head.length
        """Bytes still to come, if their number is known."""
        self._rest = b""
        """Bytes of a chunk that has not arrived completely."""
        self._ending = False
        self.complete = head.length == 0

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes, and return the part of the body in them. Raises ValueError for an invalid chunk."""
        if self._head.ends_with_connection:
            return data
        if self._head.chunked:
            return b"".join(self._chunks(self._rest + data))
        assert self._left is not None
        self._left -= len(data)
        self.complete = self._left <= 0
        return data if self._left >= 0 else data[: self._left]

    def _chunks(self, raw: bytes) -> list[bytes]:
        """The contents of the chunks that are there as a whole. What follows them is kept."""
        parts: list[bytes] = []
        begin = 0
        # By positions: a server sends each token as a chunk, and cutting off what is read would copy all that follows.
        while not self.complete and (line_end := raw.find(b"\r\n", begin)) >= 0:
            if self._ending:
                self.complete = line_end == begin  # otherwise a trailer, which nobody wants
                begin = line_end + 2
                continue
            size = int(raw[begin:line_end].partition(b";")[0], 16)
            if size < 0:
                raise ValueError("a chunk of negative size")
            self._ending = size == 0
            end = line_end + 2 + size
            if not self._ending and len(raw) < end + 2:
                break
            parts.append(raw[line_end + 2 : end])
            begin = end if self._ending else end + 2
        self._rest = raw[begin:]
        if len(self._rest) > _MAX_CHUNK_HEAD_BYTES and b"\r\n" not in self._rest:
            raise ValueError("a chunk without a size")
        return parts


class Events:
    """Splits a stream of server-sent events, and returns the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        # A regular expression looks at each byte by itself: five times slower.
        *events, self._rest = _END_OF_EVENT.split(data) if b"\r" in data else data.split(b"\n\n")
        return [found for event in events if (found := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    """Return the data lines of an event, joined; comments and other fields are skipped."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


IDLE_S = 2.0
"""Time after which an unused connection is closed, in seconds. Servers close theirs after 5 s or more, which would fail
a request sent at that moment."""

_MAX_REFUSAL_BYTES = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"

Sink = Callable[[bytes, float], None]
"""Receives a part of the body and the time of its arrival (`time.monotonic`). May raise ExchangeError."""


@dataclass(frozen=True)
class Answer:
    """The answer of an exchange. `body` is empty for status 200: then the sink has received it."""

    status: int
    body: bytes


class _Exchange(asyncio.Protocol):
    """A connection that runs one exchange at a time."""

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
        """Send a request, and wait for the end of its answer. A cancellation closes the connection. Raises
        ExchangeError."""
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
                    raise ValueError("the head is too long")
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
    """The connections to one server."""

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
        """Close the free connections. A connection in use closes when its exchange is cancelled."""
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
