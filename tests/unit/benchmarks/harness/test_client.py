"""The benchmarks' client, at a server that answers what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.harness.client import Client, Completion, ExchangeError, ask

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


def event(text: str, **fields: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps({"id": "cmpl-1", "choices": [{"text": text, **fields}]}).encode()


USAGE = b'data: {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
WHOLE = HEAD + chunked(event("a") + event("")) + chunked(event("", finish_reason="length")) + chunked(USAGE) + END


@asynccontextmanager
async def server(*answers: bytes) -> AsyncIterator[tuple[int, list[int]]]:
    """Its port, and a list of its connections, each with the number of requests that came over it. A connection ends
    after an answer that is not whole."""
    left, connections = list(answers), list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(0)
        answer = END
        while left and answer.endswith(END):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            connections[number] += 1
            answer = left.pop(0)
            # In two parts, cut anywhere.
            for part in (answer[:70], answer[70:]):
                writer.write(part)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1], connections


async def answered(*answers: bytes) -> tuple[list[Completion], list[int]]:
    async with server(*answers) as (port, connections), Client(port, "m") as client:
        return [await client.complete("x", 3) for _ in answers], connections


async def test_events_are_counted_and_connections_used_again() -> None:
    done, connections = await answered(WHOLE, WHOLE)
    assert connections == [2]
    for each in done:
        assert each.is_completed
        assert (each.request_id, each.tokens) == ("cmpl-1", 3)
        # The last one brought a token without text.
        assert len(each.chunks_s) == 3


async def test_ids_of_tokens_are_kept() -> None:
    text = event("ab", token_ids=[1, 2]) + event("c", token_ids=[3], finish_reason="length")
    (done,), _ = await answered(HEAD + chunked(text) + END)
    assert done.token_ids == [1, 2, 3]
    assert len(done.chunks_s) == 2


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (HEAD + chunked(event("a")), "broken off"),
        (HEAD + chunked(event("a")) + END, "without an end"),
        (HEAD + chunked(b'data: {"error": {"message": "no"}}\n\n') + END, "error in the stream"),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nlate", "HTTP 429: late"),
    ],
)
async def test_what_is_not_whole_is_a_failure(answer: bytes, failure: str) -> None:
    (done,), _ = await answered(answer)
    assert failure in done.failure
    assert not done.is_completed


async def test_an_answer_is_asked_for_and_a_refusal_raised() -> None:
    ok, refused = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 503 Away\r\n\r\nnobody"
    async with server(ok, refused) as (port, _):
        assert await ask(port, "POST", "/", {"a": 1}) == b"{}"
        with pytest.raises(ExchangeError, match="HTTP 503: nobody"):
            await ask(port, "GET", "/")


async def test_nobody_listens() -> None:
    async with server() as (port, _):
        pass
    async with Client(port, "m") as client:
        assert "cannot connect" in (await client.complete("x", 1)).failure
