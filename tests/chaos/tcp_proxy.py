"""A TCP proxy between a frontend and NATS whose connections can be broken or stalled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from dynamo_local.bus.address import BusAddress

_CHUNK = 65536


class TcpProxy:
    """Forwards TCP connections to `far_end`. An asynchronous context manager; clients connect to `address`."""

    def __init__(self, far_end: BusAddress) -> None:
        self._far_end = far_end
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._severed = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flows.set()
        self._abort()
        while self._links:
            await asyncio.wait(self._links)

    @property
    def address(self) -> BusAddress:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return msgspec.structs.replace(self._far_end, url=f"nats://127.0.0.1:{port}")

    async def stall(self, seconds: float) -> None:
        """Forward nothing for `seconds`, without closing a connection. Held data arrive afterwards."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()

    async def disconnect(self, seconds: float) -> None:
        """Break all connections, with the data in transit, and refuse new ones for `seconds`."""
        self._severed = True
        self._abort()
        await asyncio.sleep(seconds)
        self._severed = False

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _on_connection(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        if self._severed:
            near_out.transport.abort()
            return
        url = urlsplit(self._far_end.url)
        try:
            far_in, far_out = await asyncio.open_connection(url.hostname, url.port)
        except OSError:
            near_out.transport.abort()
            return
        self._writers |= {near_out, far_out}
        ways = ((near_in, far_out), (far_in, near_out))
        links = [asyncio.create_task(self._forward(source, sink)) for source, sink in ways]
        self._links.update(links)
        try:
            await asyncio.wait(links)
        finally:
            self._links.difference_update(links)
            for writer in (near_out, far_out):
                self._writers.discard(writer)
                writer.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        # NATS closes both directions together, so the end of one is the end of the connection.
        sink.transport.abort()
