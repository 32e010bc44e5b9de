"""Inputs of requests for embeddings, classes and scores: each becomes a sequence, and none goes uncounted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import (
    AdmissionLimits,
    Demand,
    Refusal,
    characters_of_inputs,
    examine,
    number_of_inputs,
)

LIMITS = AdmissionLimits(max_prompts=3, max_inputs=8, max_input_characters=100, max_requests=20)

MESSAGE = {"role": "user", "content": "hello"}
PART = {"content": [{"type": "text", "text": "hello"}]}


@pytest.mark.parametrize(
    ("fields", "number", "characters"),
    [
        ({}, 0, 0),
        ({"input": "hello"}, 1, 5),
        ({"input": [1, 2, 3]}, 1, 0),
        ({"input": []}, 1, 0),
        ({"input": ["hello", "world"]}, 2, 10),
        ({"input": [[1, 2], [3]]}, 2, 0),
        ({"input": [MESSAGE, MESSAGE]}, 1, 18),
        ({"input": [[MESSAGE], [MESSAGE, MESSAGE]]}, 2, 27),
        ({"texts": ["a", "b", "c"]}, 3, 3),
        ({"inputs": [PART, PART]}, 2, 18),
        ({"query": "q", "documents": ["a", "b"]}, 3, 3),
        ({"query": PART, "documents": PART}, 2, 18),
        ({"queries": ["q", "r"], "items": ["a", "b"]}, 4, 4),
        ({"text_1": "q", "text_2": "a"}, 2, 2),
        ({"data_1": ["q"], "data_2": ["a", "b", "c"]}, 4, 4),
        # Of a conversation, and of a request for scores of a model that generates.
        ({"messages": [MESSAGE], "documents": ["a"] * 9}, 0, 0),
        ({"query": "q", "items": ["a"] * 9, "label_token_ids": [1]}, 0, 0),
    ],
)
def test_inputs_are_counted_in_every_field_that_has_some(fields: Any, number: int, characters: int) -> None:
    assert (number_of_inputs(fields), characters_of_inputs(fields)) == (number, characters)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(MESSAGE),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)
FIELDS = ("input", "texts", "inputs", "query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")


@given(st.dictionaries(st.sampled_from(FIELDS), any_json, max_size=4))
def test_no_request_with_more_inputs_than_allowed_is_let_through(fields: dict[str, Any]) -> None:
    judged = examine(json.loads(json.dumps(fields)), LIMITS)
    if isinstance(judged, Refusal):
        assert judged.status == 400
        return
    for name in ("input", "texts"):
        value: Any = fields.get(name)
        many = isinstance(value, list) and value and isinstance(value[0], str)
        assert not many or len(value) <= judged.sequences <= LIMITS.max_inputs
    sides: list[Any] = [fields.get(name) for name in ("queries", "documents")]
    if None not in sides:
        assert sum(len(side) if isinstance(side, list) else 1 for side in sides) <= judged.sequences <= 8


@pytest.mark.parametrize(
    ("fields", "names", "param"),
    [
        ({"input": ["a"] * 9}, "max-inputs", "input"),
        ({"query": "q", "documents": ["a"] * 8}, "max-inputs", "documents"),
        ({"text_1": "x" * 60, "text_2": "y" * 60}, "max-input-characters", "text_2"),
        ({"input": [{"role": "user", "content": "x" * 101}]}, "max-input-characters", "input"),
    ],
)
def test_the_setting_is_named(fields: Any, names: str, param: str) -> None:
    judged = examine(json.loads(json.dumps(fields)), LIMITS)
    assert isinstance(judged, Refusal)
    assert names in judged.message
    assert judged.param == param


def test_inputs_occupy_the_server_like_prompts() -> None:
    assert examine({"input": ["a", "b", "c", "d"]}, LIMITS) == Demand(4)
    judged = examine({"input": ["a", "b", "c", "d"]}, AdmissionLimits(max_requests=3))
    assert isinstance(judged, Refusal)
    assert "max-requests" in judged.message


def test_a_body_may_nest_as_deeply_as_it_likes() -> None:
    value: Any = "end"
    for _ in range(50_000):
        value = [value]
    assert characters_of_inputs({"input": value}) == 3
