"""Orders and lines of batches: what is wrong with one is told by line and field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.stored.batches import Batch, BatchOrder, BatchState, BatchUsage, Room, next_window, order_of
from dynamo_local.core.stored.lines import (
    Line,
    LineChecks,
    LineRefusedError,
    Recorded,
    answered_line,
    recorded_in,
    unasked_line,
    usage_of,
)

ID = "batch_" + "0" * 24
ASKED = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


EXPIRES: dict[str, Any] = {"anchor": "created_at", "seconds": 7200}
OUT_OF_RANGE: list[Any] = [3599, 2592001, -3600, 0, 10**30, None]
NO_NUMBERS: list[Any] = ["7200", True, 7200.5, [7200], {}]
NO_TEXTS: list[Any] = [7, True, ["created_at"], {}]
WRONG_ANCHORS: list[Any] = ["", "last_active_at", None]
NO_OBJECTS: list[Any] = [7200, "created_at", [], True]


def ordered(**changes: Any) -> BatchOrder:
    return order_of(json.dumps(ASKED | changes).encode(), ID, "alice", 1000.5)


def test_an_order_says_what_is_wanted() -> None:
    order = ordered(metadata={"wake": "true"}, output_expires_after={"anchor": "created_at", "seconds": 7200})
    assert (order.created_at, order.expires_at, order.output_expires_after_s) == (1000, 1000 + 86400, 7200)
    assert order.wakes(by_default=False)
    assert not ordered(metadata={"wake": "false"}).wakes(by_default=True)
    assert ordered().wakes(by_default=True)
    shown = Batch(order, BatchState("in_progress"), 5).shown()
    assert shown["status"] == "cancelling"
    assert "owner" not in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "/v1/images"}, "endpoint must be one of /v1/chat/completions"),
        ({"completion_window": "0h"}, "completion_window must be from 1h to 30d"),
        ({"completion_window": "31d"}, "completion_window must be from 1h to 30d"),
        ({"completion_window": "soon"}, "got 'soon'"),
        ({"metadata": {str(n): "" for n in range(17)}}, "at most 16 entries"),
        ({"metadata": {"a": "b" * 513}}, "values 512"),
        ({"metadata": {"wake": "perhaps"}}, "wake in metadata"),
        ({"completion_window": "721h"}, "completion_window must be from 1h to 30d"),
        ({"metadata": {"k" * 65: ""}}, "at most 64 characters"),
        ({"metadata": {"a": 1}}, "metadata"),
        *(({"output_expires_after": EXPIRES | {"seconds": value}}, "3600 to 2592000") for value in OUT_OF_RANGE),
        *(({"output_expires_after": EXPIRES | {"seconds": value}}, r"expires_after\.seconds") for value in NO_NUMBERS),
        *(({"output_expires_after": EXPIRES | {"anchor": value}}, r"expires_after\.anchor") for value in NO_TEXTS),
        *(({"output_expires_after": EXPIRES | {"anchor": value}}, "must be created_at") for value in WRONG_ANCHORS),
        *(({"output_expires_after": value}, "output_expires_after") for value in NO_OBJECTS),
        ({"output_expires_after": {"anchor": "created_at", "second": 7200}}, "unknown field `second`"),
        ({"more": 1}, "unknown field `more`"),
        ({"input_file_id": 7}, "input_file_id"),
    ],
)
def test_a_wrong_order_is_told_by_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ordered(**changes)


def test_bounds_of_an_order_belong_to_what_may_be() -> None:
    metadata = {f"{n:064}": "v" * 512 for n in range(16)}
    assert ordered(metadata=metadata).metadata == metadata
    for window, seconds in (("1h", 3600), ("720h", 2592000), ("1d", 86400), ("30d", 2592000)):
        assert ordered(completion_window=window).expires_at == 1000 + seconds
    for seconds in (3600, 2592000):
        expires = {"anchor": "created_at", "seconds": seconds}
        assert ordered(output_expires_after=expires).output_expires_after_s == seconds
    assert ordered(output_expires_after=None).output_expires_after_s == 2592000


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}


def judge(fields: dict[str, Any]) -> Refusal | None:
    if fields.get("model") == "m":
        return None
    return Refusal(404, "The model `x` does not exist.", "NotFoundError", "model")


def checks() -> LineChecks:
    return LineChecks("/v1/completions", judge)


def test_a_line_keeps_its_body_as_it_was_given() -> None:
    text = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m",  "x":1.50}}\n'
    assert checks().check(3, text) == Line(3, "a", "/v1/completions", b'{"model":"m",  "x":1.50}')


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": 7}, "invalid_request", "custom_id"),
        ({"custom_id": ""}, "invalid_request", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_request", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"url": None}, "invalid_url", "url"),
        ({"body": [1]}, "invalid_request", "body"),
        ({"body": {"model": "other"}}, "model_not_found", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "invalid_request", "body.stream"),
        ({"body": {"model": "m", "background": True}}, "invalid_request", "body.background"),
    ],
)
def test_a_wrong_line_is_told_by_number_and_field(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(LineRefusedError) as refused:
        checks().check(7, json.dumps(LINE | changes).encode())
    error = refused.value.error
    assert (error.code, error.param, error.line) == (code, param, 7)
    assert error.message.startswith("line 7: ")


@pytest.mark.parametrize("text", [b"nonsense", b"[]", b'{"custom_id": NaN}', b"\xff\n", b"{" * 5000])
def test_a_line_that_is_no_json_is_told(text: bytes) -> None:
    with pytest.raises(LineRefusedError) as refused:
        checks().check(1, text)
    assert refused.value.error.code == "invalid_json_line"


def test_a_custom_id_is_used_once() -> None:
    looked = checks()
    looked.check(1, json.dumps(LINE).encode())
    with pytest.raises(LineRefusedError, match="line 9: custom_id is that of line 1"):
        looked.check(9, json.dumps(LINE).encode())


@given(st.text(min_size=1), st.recursive(st.text() | st.integers(-(2**53), 2**53), st.lists))
def test_results_are_one_line_each_and_tell_whose_they_are(custom_id: str, content: Any) -> None:
    body = json.dumps({"answer": content}, indent=2).encode()
    for line in (answered_line("r", custom_id, 200, body), unasked_line("r", custom_id, "code", "why")):
        assert (line.count(b"\n"), recorded_in(line)) == (1, Recorded(custom_id, BatchUsage()))
        # What a crash has cut off is no result.
        assert all(recorded_in(line[:cut]) is None for cut in range(len(line)))
    found = json.loads(answered_line("r", custom_id, 200, body))
    assert found["response"] == {"status_code": 200, "request_id": "r", "body": {"answer": content}}
    assert json.loads(answered_line("r", "a", 500, b"no json"))["response"]["body"] == "no json"


rooms = st.builds(
    Room,
    workers=st.integers(0, 4),
    slots=st.integers(0, 300),
    people=st.integers(0, 3),
    waiting=st.integers(0, 3),
    kv_usage=st.floats(0, 1),
)


@given(st.integers(0, 500), st.integers(0, 500), rooms, st.integers(1, 300))
def test_a_window_is_bounded_and_small_while_people_ask(window: int, in_flight: int, room: Room, most: int) -> None:
    found = next_window(window, in_flight, room, most)
    assert 0 <= found <= most
    assert (found == 0) == (room.workers == 0)
    if room.people:
        assert found <= room.workers


def test_a_window_that_is_used_grows_to_what_the_engines_run() -> None:
    room = Room(workers=2, slots=128, people=0, waiting=0, kv_usage=0.1)
    window, ticks = 0, 0
    while window < 128:
        window, ticks = next_window(window, window, room, 256), ticks + 1
    assert ticks <= 8
    assert next_window(window, window, room, 256) == 128
    # One that is not used up does not grow.
    assert next_window(8, 2, room, 256) == 8


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}, (3, 1, 2, 0)),
        ({"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": None}, (3, 0, 0, 0)),
        ({"input_tokens": 3, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}, (3, 0, 2, 1)),
        ("none", (0, 0, 0, 0)),
    ],
)
def test_the_tokens_that_an_answer_tells_of_are_those_of_its_result(usage: Any, expected: tuple[int, ...]) -> None:
    body = json.dumps({"usage": usage}).encode()
    assert usage_of(body) == BatchUsage(*expected)
    assert recorded_in(answered_line("r", "a", 200, body)) == Recorded("a", BatchUsage(*expected))
