"""A stream whose first event is an error: its client gets the error's status, and nothing else of the stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from components.frontend.http.outgoing import Outgoing, Renaming
from dynamo_local.core.http.asgi import Event

STREAM: Event = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
DONE = b"data: [DONE]\n\n"


def error(code: Any = 400) -> bytes:
    content = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": code}}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def body(data: bytes, *, more: bool = True) -> Event:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def sent(*events: Event) -> list[Event]:
    came: list[Event] = []

    async def send(event: Event) -> None:
        came.append(event)

    wrapped = Outgoing(send, Renaming("Frontend", ()), 2)
    for event in events:
        await wrapped(event)
    return came


@pytest.mark.parametrize("code", [400, 500, 503])
async def test_an_error_before_everything_else_is_an_http_error(code: int) -> None:
    start, content = await sent(STREAM, body(b""), body(error(code)), body(DONE), body(b"", more=False))
    assert start["status"] == code
    assert (b"content-type", b"application/json") in start["headers"]
    assert json.loads(content["body"])["error"]["code"] == code
    assert not content.get("more_body", False)


async def test_an_error_in_a_stream_that_has_begun_stays_in_it() -> None:
    events = [STREAM, body(b"data: {}\n\n"), body(error()), body(DONE), body(b"", more=False)]
    assert await sent(*events) == events


@pytest.mark.parametrize(
    "first", [b": keep-alive\n\n", b'data: {"error": 1}\n\n', b'data: {"error" no json\n\n', error("400"), error(200)]
)
async def test_what_is_no_error_passes_as_it_is(first: bytes) -> None:
    events = [STREAM, body(first), body(DONE, more=False)]
    assert await sent(*events) == events


async def test_an_empty_stream_begins_and_ends() -> None:
    assert await sent(STREAM, body(b"", more=False)) == [STREAM, body(b"", more=False)]


async def test_an_answer_that_is_no_stream_passes_at_once() -> None:
    start: Event = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
    assert await sent(start) == [start]
