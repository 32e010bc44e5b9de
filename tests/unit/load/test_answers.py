"""Reading the wire: heads, bodies, events, completions."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.load.client import AnswerReader, refusal
from dynamo_local.load.connection import Body, Events, ExchangeError, Head, parse_head
from dynamo_local.load.figures import Record

EVENTS = [b'{"choices":[]}', b"x", b"[DONE]"]


def pieces(wire: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    return [wire[start:end] for start, end in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 300), max_size=8)


@given(cuts, cuts, st.sampled_from(["", "Trailer: x\r\n"]))
def test_chunks_and_events_are_whole_however_they_are_cut(
    chunk_cuts: list[int], packet_cuts: list[int], trailer: str
) -> None:
    events = b"".join(b"data: " + event + b"\n\n" for event in EVENTS)
    chunks = b"".join(b"%x;e=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in pieces(events, chunk_cuts))
    wire = chunks + b"0\r\n" + trailer.encode() + b"\r\n"
    body, reader = Body(Head(200, None, True, True)), Events()
    assert [event for piece in pieces(wire, packet_cuts) for event in reader.feed(body.feed(piece))] == EVENTS
    assert body.complete


@given(st.binary(max_size=60), cuts)
def test_a_body_of_known_length_ends_there(data: bytes, packet_cuts: list[int]) -> None:
    body = Body(Head(200, len(data), False, True))
    assert b"".join(body.feed(piece) for piece in pieces(data, packet_cuts)) == data
    assert body.complete


def test_an_incomplete_body_is_not_complete() -> None:
    body = Body(Head(200, None, True, True))
    assert body.feed(b"2\r\nab\r\n0\r\n") == b"ab"
    assert not body.complete


@pytest.mark.parametrize("wire", [b"no size\r\n", b"-5\r\n", b"1" * 5000])
def test_what_is_no_chunk_is_refused(wire: bytes) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|size"):
        Body(Head(200, None, True, True)).feed(wire)


@pytest.mark.parametrize(
    ("raw", "head"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", Head(200, 5, False, True)),
        (b"HTTP/1.1 200\r\ntransfer-encoding:  Chunked\r\nContent-Length: 5", Head(200, None, True, True)),
        (b"HTTP/1.1 429 Too Many\r\nConnection: close", Head(429, None, False, False)),
        (b"HTTP/1.0 200 OK", Head(200, None, False, False)),
        (b"HTTP/1.1 204 No Content", Head(204, 0, False, True)),
    ],
)
def test_heads(raw: bytes, head: Head) -> None:
    assert parse_head(raw) == head


@pytest.mark.parametrize("raw", [b"SSH-2.0", b"HTTP/1.1 abc", b"HTTP/1.1 200 OK\r\nContent-Length: x"])
def test_what_is_no_head_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"HTTP|invalid literal"):
        parse_head(raw)


def test_events_may_have_other_fields_and_line_ends() -> None:
    events = Events().feed(b": ping\n\nevent: e\r\ndata: one\r\n\r\ndata:two\ndata: lines\n\nid: 7\n\ndata: rest")
    assert events == [b"one", b"two\nlines"]


def answer(*events: Any) -> Record:
    """The record after these events at 1, 2, ... seconds."""
    record = Record(0.0, 5, 5)
    reader = AnswerReader(record)
    for second, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event)
        reader.take(f"data: {data}\n\n".encode(), float(second))
    reader.end()
    return record


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def used(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def test_a_completion_with_usage() -> None:
    # The second token completes no character yet; the last one brings no text.
    record = answer(text("a"), text(""), text("b"), text("", "length"), used(5, 4), "[DONE]")
    assert record.chunks_s == [1, 2, 3, 4]
    assert (record.tokens, record.prompt_tokens) == (4, 5)


def test_an_empty_end_of_a_completion_may_be_no_token() -> None:
    assert answer(text("a"), text("b"), text("", "stop"), used(5, 2), "[DONE]").chunks_s == [1, 2]


def test_the_first_chunk_of_a_chat_only_names_the_role() -> None:
    record = answer(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta(tool_calls=[{"index": 0}]),
        delta("stop"),
        "[DONE]",
    )
    assert record.chunks_s == [2, 3, 4]
    assert record.tokens == 3
    assert record.prompt_tokens is None


@pytest.mark.parametrize(
    ("events", "kind", "says"),
    [
        ([text("a"), {"error": {"message": "the worker\nis gone"}}], "error in the stream", "the worker is gone"),
        ([{"object": "error", "message": "old style"}], "error in the stream", "old style"),
        (["{"], "bad answer", "is not a completion"),
        ([text("a")], "broken off", "without an end"),
        ([text("", "stop"), used(5, 0), "[DONE]"], "no tokens", "no tokens"),
        (["[DONE]"], "no tokens", "no tokens"),
    ],
)
def test_answers_that_are_none(events: list[Any], kind: str, says: str) -> None:
    with pytest.raises(ExchangeError, match=says) as failure:
        answer(*events)
    assert failure.value.kind == kind


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "slow down", "code": 429}}', "slow down"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "gone"}', "gone"),
        (b"<h1>oops</h1>", "<h1>oops</h1>"),
        (b"", ""),
        (b"x" * 999, "x" * 199 + "…"),
        (b'{"error": {}}', "{'error': {}}"),
    ],
)
def test_refusals_are_told_in_the_servers_words(body: bytes, says: str) -> None:
    error = refusal(429, body)
    assert (error.kind, error.cause) == ("HTTP 429", says)
