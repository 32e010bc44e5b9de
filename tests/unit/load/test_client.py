"""One completion at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.load.client import Asking, Client, parse_url
from dynamo_local.load.figures import Completion
from tests.unit.load.stub import Exchange, Respond, Stub, complete, serving

COMMENT = b"8\r\n: ping\n\n\r\n"


@asynccontextmanager
async def asked(
    respond: Respond = complete, timeout_s: float = 30.0, **fields: Any
) -> AsyncIterator[tuple[Client, Stub]]:
    async with serving(Stub(respond)) as stub:
        asking = Asking("tiny", False, True, fields)
        async with Client(parse_url(stub.url), asking, timeout_s) as client:
            yield client, stub


def tokens(*ids: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids), "finish_reason": finish}]}


async def test_a_completion_is_measured_by_the_clock_of_its_caller() -> None:
    begin = time.monotonic()
    async with asked() as (client, stub):
        found = await client.complete([5, 6, 7], 3)
    assert (found.error, found.failure) == ("", "")
    assert (found.tokens, found.prompt_tokens, found.output_tokens) == (3, 3, 3)
    assert found.sent_s is not None
    assert found.ended_s is not None
    times = [begin, found.at_s, found.sent_s, *found.chunks_s, found.ended_s, time.monotonic()]
    assert len(found.chunks_s) == 3
    assert times == sorted(times)
    (exchange,) = stub.asked
    assert exchange.body["prompt"] == [5, 6, 7]
    assert (exchange.body["max_tokens"], exchange.body["temperature"], exchange.body["ignore_eos"]) == (3, 0, True)


async def test_token_ids_are_kept_where_the_server_tells_them() -> None:
    async def with_ids(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(tokens(7, 8))
        exchange.event(tokens())
        exchange.event(tokens(9, finish="length"))
        exchange.event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
        exchange.event("[DONE]")
        exchange.writer.write(b"0\r\n\r\n")

    async with asked(with_ids, return_token_ids=True, cache_salt="s") as (client, stub):
        found = await client.complete("a b", 3)
    assert found.token_ids == [7, 8, 9]
    assert len(found.chunks_s) == 2
    assert found.tokens == 3
    body = stub.asked[0].body
    assert (body["prompt"], body["return_token_ids"], body["cache_salt"]) == ("a b", True, "s")


async def test_a_connection_is_used_again() -> None:
    async with asked() as (client, stub):
        for _ in range(3):
            await client.complete("a", 1)
    assert len(stub.asked) == 3
    assert stub.connections == 1


async def test_a_failure_is_written_down() -> None:
    async def refuse(exchange: Exchange) -> None:
        exchange.whole("400 Bad Request", {"error": {"message": "no such thing"}})

    async with asked(refuse) as (client, _):
        found = await client.complete("a", 1)
    assert found.failure == "HTTP 400: no such thing"
    assert found.ended_s is not None
    assert not found.is_completed


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with asked(silent, timeout_s=0.05) as (client, _):
        found = await client.complete("a", 1)
    assert found.error == "timeout"


async def test_a_completion_can_be_watched_and_cancelled() -> None:
    closed = asyncio.Event()

    async def endless(exchange: Exchange) -> None:
        exchange.stream()
        exchange.tokens(2)
        while not exchange.writer.transport.is_closing():
            exchange.writer.write(COMMENT)
            await asyncio.sleep(0.01)
        closed.set()

    watched = Completion()
    async with asked(endless) as (client, _):
        asking = asyncio.create_task(client.complete("a", 5, watched))
        async with asyncio.timeout(30):
            while len(watched.chunks_s) < 2:  # noqa: ASYNC110  # filled by a protocol
                await asyncio.sleep(0.01)
        assert not watched.is_completed
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert watched.error == "cut off"
        assert watched.ended_s is not None
        assert watched.tokens == 2
        async with asyncio.timeout(30):
            await closed.wait()


async def test_fields_of_each_request_cannot_be_set() -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        Client(parse_url("http://127.0.0.1:1"), Asking("tiny", False, True, json.loads('{"max_tokens": 1}')))
