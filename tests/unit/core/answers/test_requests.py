"""What is kept, and what vLLM's application gets of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.core.answers.records import AnswerHead
from dynamo_local.core.answers.requests import (
    asking_fields,
    continued,
    continued_body,
    contradiction,
    inner_body,
    is_answer_id,
    is_kept,
    unfit_field,
)
from dynamo_local.core.http.bounds.admission import Refusal


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, False),
        ({"background": True}, True),
        ({"background": "yes"}, True),
        ({"background": 1}, True),
        ({"background": "maybe"}, False),
        ({"store": True}, True),
        ({"store": "true"}, True),
        ({"store": 1}, True),
        ({"store": 1.0}, True),
        ({"store": "0", "background": "off"}, False),
        ({"store": False}, False),
        ({"previous_response_id": "resp_1"}, True),
        ({"previous_response_id": "resp_1", "store": None}, True),
        ({"previous_response_id": "resp_1", "store": False}, False),
        ({"previous_response_id": "resp_1", "store": "no"}, False),
        ({"previous_response_id": None}, False),
    ],
)
def test_what_nobody_asks_to_be_kept_is_not(fields: dict[str, Any], kept: bool) -> None:
    assert is_kept(fields) == kept
    body = json.dumps({"input": "x", **fields}).encode()
    assert (asking_fields(body) is not None) == (kept or fields.get("previous_response_id") is not None)


@pytest.mark.parametrize("value", [True, "true", 1, "on"])
def test_where_answers_are_results_nothing_is_streamed_or_kept_besides(value: Any) -> None:
    for name in ("stream", "background", "store"):
        assert unfit_field({name: value}, ("/v1/responses",)) == name
    # There, the field is not read.
    assert unfit_field({"store": value}, ("/v1/chat/completions",)) is None
    assert unfit_field({"stream": "false", "background": 0, "store": None}, ("/v1/responses",)) is None


def test_what_goes_on_in_the_background_is_kept() -> None:
    assert contradiction({"background": "true", "store": "false"}) is not None
    assert contradiction({"background": "true", "store": "true"}) is None
    assert contradiction({"background": "false", "store": "false"}) is None


def test_an_answer_that_is_not_kept_has_the_conversation_before_it() -> None:
    fields = {"model": "m", "input": "b", "previous_response_id": "resp_1", "store": False, "stream": "1"}
    a, b = ({"role": "user", "content": text} for text in "ab")
    assert json.loads(continued_body(fields, [a])) == {"model": "m", "input": [a, b], "store": False, "stream": "1"}


@pytest.mark.parametrize("body", [b"", b"{", b'["store"]', b'{"store": true', b'\xff"store"', b'{"store": NaN}'])
def test_what_is_no_body_is_left_to_others(body: bytes) -> None:
    assert asking_fields(body) is None


def head(number: int, earlier: list[Any], **fields: Any) -> AnswerHead:
    return AnswerHead(answer=f"resp_{number}", created_at=number, fields=fields, earlier=earlier)


def test_a_conversation_has_all_that_was_said_before() -> None:
    first = head(1, [], input="a", background=True, store=True)
    assert json.loads(inner_body(first)) == {"input": "a", "stream": True, "store": False, "request_id": "resp_1"}
    earlier = continued(first, {"status": "completed", "output": [{"id": "A"}]})
    assert not isinstance(earlier, Refusal)
    second = head(2, earlier, input=[{"role": "user", "content": "b"}], previous_response_id="resp_1")
    earlier = continued(second, {"status": "incomplete", "output": [{"id": "B"}]})
    assert not isinstance(earlier, Refusal)
    third = json.loads(inner_body(head(3, earlier, input="c", previous_response_id="resp_2", instructions="short")))
    a, b, c = ({"role": "user", "content": text} for text in "abc")
    assert third["input"] == [a, {"id": "A"}, b, {"id": "B"}, c]
    assert third["instructions"] == "short"
    assert "previous_response_id" not in third


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_only_an_answer_that_is_whole_is_continued(status: str) -> None:
    refused = continued(head(1, [], input="a"), {"status": status})
    assert isinstance(refused, Refusal)
    assert refused.param == "previous_response_id"


def test_ids_are_no_paths() -> None:
    assert is_answer_id("resp_" + 32 * "a")
    for text in (
        "",
        "resp_",
        "../" + 32 * "a",
        "resp_" + 31 * "a" + "/",
        "resp_" + 32 * "a" + "\n",
        "RESP_" + 32 * "a",
    ):
        assert not is_answer_id(text)
