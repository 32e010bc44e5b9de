"""A minimal HTTP/1.1 server for the example: `GET /generate?text=...` streams chunks, `GET /health` answers ok.

Each connection serves one request. Requests are bounded in size and time, and the work ends when the client
disconnects. For real traffic use a real server, as `components/frontend/service.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs, urlsplit

from dynamo_local.core.errors import DynamoError, PortInUseError

_MAX_LINE_BYTES = 8192
_MAX_HEADERS = 64
_MAX_CONNECTIONS = 100
_REQUEST_DEADLINE_S = 10.0
_DRAIN_DEADLINE_S = 5.0

Generate = Callable[[str], AsyncIterator[str]]


class _BadRequestError(Exception):
    def __init__(self, status: HTTPStatus, detail: str = "") -> None:
        super().__init__(detail or status.phrase)
        self.status = status


class HttpStream:
    """An HTTP server in front of one generator function."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str | None:
        """The address of the server; None if it does not listen."""
        if self._server is None or not self._server.sockets:
            return None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises PortInUseError."""
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", "use another port") from error

    async def stop(self) -> None:
        """Refuse new connections, and give running answers some time to finish."""
        if self._server is None:
            return
        self._server.close()
        if self._connections:
            _, left = await asyncio.wait(self._connections, timeout=_DRAIN_DEADLINE_S)
            for task in left:
                task.cancel()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="http connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            text = await self._read_request(reader)
            answer = asyncio.ensure_future(self._answer(writer, text))
            gone = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                answer.cancel()
                gone.cancel()
                await asyncio.wait({answer, gone})
            if not answer.cancelled():
                answer.result()
        except _BadRequestError as error:
            _write_all(writer, error.status, f"{error}\n")
        except (OSError, asyncio.IncompleteReadError):
            return  # the client has disconnected
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _read_request(self, reader: asyncio.StreamReader) -> str | None:
        """Read a request, and return its text; None for `/health`. Raises _BadRequestError."""
        if len(self._connections) > _MAX_CONNECTIONS:
            raise _BadRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        try:
            async with asyncio.timeout(_REQUEST_DEADLINE_S):
                method, target = await _read_head(reader)
        except TimeoutError as error:
            raise _BadRequestError(HTTPStatus.REQUEST_TIMEOUT) from error
        try:
            url = urlsplit(target)
        except ValueError as error:
            raise _BadRequestError(HTTPStatus.BAD_REQUEST) from error
        if url.path not in ("/generate", "/health"):
            raise _BadRequestError(HTTPStatus.NOT_FOUND, "there are /generate?text=... and /health")
        if method != "GET":
            raise _BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED)
        if url.path == "/health":
            return None
        texts = parse_qs(url.query).get("text", [])
        if len(texts) != 1:
            raise _BadRequestError(HTTPStatus.BAD_REQUEST, "give one text: /generate?text=hello")
        return texts[0]

    async def _answer(self, writer: asyncio.StreamWriter, text: str | None) -> None:
        if text is None:
            _write_all(writer, HTTPStatus.OK, "ok\n")
            return
        # Endpoints are async generators, but annotated as iterators, which have no aclose().
        replies = cast("AsyncGenerator[str, None]", self._generate(text))
        async with aclosing(replies):
            await _write_chunks(writer, replies)


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Read the head of a request; return its method and target. Headers are ignored. Raises _BadRequestError."""
    try:
        line = (await reader.readuntil(b"\n")).decode("ascii").split()
        for _ in range(_MAX_HEADERS):
            if not (await reader.readuntil(b"\n")).strip():
                break
        else:
            raise _BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    except asyncio.LimitOverrunError as error:
        raise _BadRequestError(HTTPStatus.REQUEST_URI_TOO_LONG) from error
    except UnicodeDecodeError as error:
        raise _BadRequestError(HTTPStatus.BAD_REQUEST) from error
    if len(line) != 3 or not line[2].startswith("HTTP/1."):
        raise _BadRequestError(HTTPStatus.BAD_REQUEST)
    return line[0], line[1]


async def _write_chunks(writer: asyncio.StreamWriter, replies: AsyncIterator[str]) -> None:
    """Write each reply as a chunk. An error before the first reply is answered with 503; a later one ends the stream
    without its last chunk."""
    started = False
    try:
        async for reply in replies:
            if not started:
                writer.write(_head(HTTPStatus.OK, "Transfer-Encoding: chunked"))
                started = True
            data = f"{reply}\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
    except DynamoError as error:
        if not started:
            _write_all(writer, HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
        return
    if not started:
        writer.write(_head(HTTPStatus.OK, "Transfer-Encoding: chunked"))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _write_all(writer: asyncio.StreamWriter, status: HTTPStatus, text: str) -> None:
    data = text.encode()
    writer.write(_head(status, f"Content-Length: {len(data)}") + data)


def _head(status: HTTPStatus, length: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: text/plain; charset=utf-8",
        "Connection: close",
        length,
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()
