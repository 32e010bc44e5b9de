"""A receiver of callbacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Receiver:
    """Answers with `statuses` first, one each call, and then with 200. `answers`: bytes to answer with instead."""

    def __init__(self, *statuses: int, answers: bytes = b"") -> None:
        self.statuses = list(statuses)
        self.answers = answers
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/done?x=1"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.calls]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Receiver]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        self.calls.append((headers | {"line": head.split("\r\n")[0]}, body))
        status = self.statuses.pop(0) if self.statuses else 200
        writer.write(self.answers or f"HTTP/1.1 {status} Whatever\r\nlocation: http://10.0.0.1/\r\n\r\n".encode())
        writer.close()
