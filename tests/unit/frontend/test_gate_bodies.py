"""The gate and bodies: in pieces, too large, mislabelled, cut off, and handed on as they came."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.frontend.http.incoming import read_body
from dynamo_local.core.http.asgi import Event
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import ROUTES
from tests.unit.frontend.asgi_driver import Answer, Backend, House, call, scope

LIMIT = 1000
PATH = "/v1/completions"
READING = sorted(path for path, route in ROUTES.items() if "POST" in route.methods)


def body_of(size: int) -> bytes:
    frame = b'{"prompt": ""}'
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=6))
async def test_a_body_in_pieces_is_handed_on_whole(pieces: list[bytes]) -> None:
    house = House(backend=Backend())
    await call(house.gate, scope("/tokenize"), pieces)
    assert house.backend.requests == [("POST", "/tokenize", b"".join(pieces))]


@given(st.lists(st.tuples(st.binary(max_size=50), st.integers(0, 2)), min_size=1, max_size=6))
async def test_pieces_may_come_late(pieces: list[tuple[bytes, int]]) -> None:
    """`pieces`: with how often the event loop turns until each is there."""
    rest = list(pieces)

    async def receive() -> Event:
        piece, turns = rest.pop(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": bool(rest)}

    assert await read_body({}, receive, AdmissionLimits()) == b"".join(piece for piece, _ in pieces)


@pytest.mark.parametrize("pieces", [0, 1])
async def test_a_wait_for_the_rest_can_be_cancelled(pieces: int) -> None:
    waits, ended = asyncio.Event(), asyncio.Event()
    came = 0

    async def receive() -> Event:
        nonlocal came
        if (came := came + 1) <= pieces:
            return {"type": "http.request", "body": b"{", "more_body": True}
        waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    reading = asyncio.create_task(read_body({}, receive, AdmissionLimits()))
    await waits.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended.is_set()


async def test_after_the_body_the_server_hears_when_the_client_hangs_up() -> None:
    house = House()
    await house.post(PATH)
    assert house.backend.after_body == ["http.disconnect"]


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_body_is_bounded_however_it_comes(path: str, pieces: int) -> None:
    house = House()
    body = body_of(LIMIT + 1)
    step = len(body) // pieces + 1
    answer = await call(house.gate, scope(path), [body[i : i + step] for i in range(0, len(body), step)])
    assert answer.status == 413
    assert str(LIMIT) in answer.error["message"]
    assert house.backend.requests == []


async def test_a_body_of_exactly_the_limit_passes() -> None:
    house = House()
    assert (await house.post(PATH, body_of(LIMIT))).status == 200


@pytest.mark.parametrize("length", [str(LIMIT + 1), "9" * 30, "9" * 5000])
async def test_an_announced_excess_is_refused_unread(length: str) -> None:
    house = House()
    answer = await call(house.gate, scope(PATH, headers=[("Content-Length", length)]), [b"{}"])
    assert answer.status == 413


@pytest.mark.parametrize("lengths", [["5"], ["0"], ["-1"], ["x"], [""], ["1e9"], ["٩"], ["2", "5000"], ["5", "2"]])
async def test_what_a_header_says_does_not_widen_the_limit(lengths: list[str]) -> None:
    house = House()
    headers = [("Content-Length", length) for length in lengths]
    answer = await call(house.gate, scope(PATH, headers=headers), [b" " * 600, b" " * 600])
    assert answer.status == 413


async def test_whoever_sends_without_end_is_stopped_at_the_limit() -> None:
    house = House()
    pieces = [b"x" * 100] * 1000
    assert (await call(house.gate, scope(PATH), pieces, hang_up=True)).status == 413


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize("sent", [[b""], [b'{"prompt": "a"}', b" "]])
async def test_who_hangs_up_before_the_end_of_the_body_is_not_served(path: str, sent: list[bytes]) -> None:
    house = House()
    answer = await call(house.gate, scope(path), sent, hang_up=True)
    assert answer.status is None
    assert house.backend.requests == []
    assert await house.free_sequences() == 4


async def test_a_body_that_comes_too_slowly_is_cut_off() -> None:
    """Also one of which something comes all the time."""
    house = House(limits=AdmissionLimits(body_timeout_s=0.2))
    answer = Answer()

    async def receive() -> Event:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(event: Event) -> None:
        answer.status = event.get("status", answer.status)
        answer.headers |= {name.decode(): value.decode() for name, value in event.get("headers", ())}
        answer.body += event.get("body", b"")

    await asyncio.wait_for(house.gate(scope(PATH), receive, send), 60)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "body-timeout-s" in answer.error["message"]
    assert house.backend.requests == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
async def test_json_in_other_encodings_is_judged_and_handed_on_in_utf_8(encoding: str) -> None:
    house = House(limits=AdmissionLimits(max_n=2))
    assert (await house.post(PATH, json.dumps({"n": 3}).encode(encoding))).status == 400
    assert (await house.post(PATH, '{"prompt": "é"}'.encode(encoding))).status == 200
    assert house.backend.requests == [("POST", PATH, '{"prompt": "é"}'.encode())]


async def test_bytes_that_are_no_text_are_refused() -> None:
    house = House()
    assert "no text" in (await house.post(PATH, b"\xff\xfe{")).error["message"]
    assert house.backend.requests == []


@pytest.mark.parametrize("path", [*READING, "/v1/files", "/v1/batches", "/v1/async-tasks"])
async def test_a_compressed_body_is_refused_as_what_it_is(path: str) -> None:
    house = House()
    for coding in ("gzip", "deflate", "br", "GZIP"):
        answer = await house.post(path, b"\x1f\x8b\x08", [("Content-Encoding", coding)])
        assert (answer.status, coding in answer.error["message"]) == (415, True)
    assert (await house.post(PATH, b"{}", [("Content-Encoding", "identity")])).status == 200
