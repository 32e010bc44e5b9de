"""A small OpenAI server that behaves, or misbehaves, as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Respond = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """A request, with methods to answer it."""

    path: str
    headers: dict[str, str]
    body: Any
    connection: int
    writer: asyncio.StreamWriter

    def head(self, status: str = "200 OK", *more: str) -> None:
        lines = "\r\n".join([f"HTTP/1.1 {status}", *more])
        self.writer.write(f"{lines}\r\n\r\n".encode())

    def whole(self, status: str, body: Any) -> None:
        """An answer in one piece."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.head(status, f"Content-Length: {len(data)}")
        self.writer.write(data)

    def stream(self) -> None:
        self.head("200 OK", "Transfer-Encoding: chunked", "Content-Type: text/event-stream")

    def event(self, data: Any) -> None:
        event = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.writer.write(b"%x\r\n%s\r\n" % (len(event), event))

    def tokens(self, count: int) -> None:
        for _ in range(count):
            self.event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})

    def end(self, tokens: int) -> None:
        prompt = len(self.body["prompt"])
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
        self.event("[DONE]")
        self.writer.write(b"0\r\n\r\n")


async def complete(exchange: Exchange) -> None:
    """Answer with all requested tokens at once."""
    wanted = exchange.body["max_tokens"]
    exchange.stream()
    exchange.tokens(wanted)
    exchange.end(wanted)


@dataclass
class Stub:
    """A server with a given handler of completions. `asked`: the completions that it has received."""

    respond: Respond = complete
    tokenize: Any = field(default_factory=lambda: {"tokens": [*range(300, 340)]})
    """Answer of `/tokenize`; None: the server has no such path."""
    models: tuple[str, Any] = ("200 OK", {"data": [{"id": "tiny", "max_model_len": 4096}]})
    port: int = 0
    asked: list[Exchange] = field(default_factory=list)
    """Completions."""
    connections: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        number = self.connections
        try:
            while not writer.is_closing():
                await self._answer(await _read(reader, writer, number))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/models":
                exchange.whole(*self.models)
            case "/tokenize" if self.tokenize is not None:
                exchange.whole("200 OK", self.tokenize)
            case "/v1/completions" | "/v1/chat/completions":
                self.asked.append(exchange)
                await self.respond(exchange)
            case _:
                exchange.whole("404 Not Found", {"detail": "Not Found"})

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Exchange:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    data = await reader.readexactly(int(headers.get("content-length", "0")))
    return Exchange(head[0].split()[1], headers, json.loads(data) if data else None, number, writer)


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[Stub]:
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()
        stub.hang_up()
