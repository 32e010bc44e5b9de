"""The HTTP server of the hello-world example: what it answers, what it refuses, and that it cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_local.core.errors import PortInUseError, RpcError
from examples.hello_world.http_stream import HttpStream

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


class Words:
    """What stands behind the server."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def generate(self, text: str) -> AsyncIterator[str]:
        try:
            for word in text.split():
                if word == "fail":
                    raise RpcError("Middle is gone")
                yield word
                if word == "wait":
                    await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def listening(words: Words) -> AsyncIterator[tuple[str, int]]:
    server = HttpStream(words.generate)
    await server.start("127.0.0.1", 0)
    assert server.url is not None
    host, _, port = server.url.removeprefix("http://").partition(":")
    try:
        yield host, int(port)
    finally:
        await server.stop()


async def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """All that the server sends before it closes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    return answer


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_one_chunk_for_each_reply() -> None:
    async with listening(Words()) as address:
        head, _, body = (await exchange(address, get("/generate?text=a+bcd"))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert body == b"2\r\na\n\r\n4\r\nbcd\n\r\n0\r\n\r\n"
        assert (await exchange(address, get("/health"))).endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/other"), b"404"),
        (get("/generate"), b"400"),
        (get("/generate?text=a&text=b"), b"400"),
        (b"POST /generate?text=a HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (get(f"/generate?text={'x' * 10_000}"), b"414"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 100 + b"\r\n", b"431"),
        (get("/generate?text=fail"), b"503"),
    ],
)
async def test_what_cannot_be_answered_gets_its_status(request_: bytes, status: bytes) -> None:
    async with listening(Words()) as address:
        assert (await exchange(address, request_)).split(b" ")[1] == status


async def test_an_error_after_the_first_reply_breaks_the_stream_off() -> None:
    async with listening(Words()) as address:
        answer = await exchange(address, get("/generate?text=a+fail"))
        assert answer.endswith(b"2\r\na\n\r\n")


async def test_a_client_that_goes_away_ends_the_work() -> None:
    words = Words()
    async with listening(words) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(get("/generate?text=wait"))
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b"wait\n")
            writer.close()
            await words.ended.wait()


async def test_an_address_in_use_is_named() -> None:
    async with listening(Words()) as (host, port):
        with pytest.raises(PortInUseError, match=f"cannot listen on {host}:{port}"):
            await HttpStream(Words().generate).start(host, port)
