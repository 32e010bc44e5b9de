"""Bounds of one request: everything beyond is refused by name, and what is within is let through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.request import (
    NAME_CHARACTERS,
    SALT_CHARACTERS,
    Excess,
    RequestBounds,
    excess_of,
    excess_of_headers,
    fields_of_text,
)

BOUNDS = RequestBounds(max_tokenize_bytes=1000, max_grammar_bytes=200, max_choices=5, max_regex_bytes=20, max_words=4)
CANDIDATES = 3
TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}


def excess(**fields: Any) -> Excess | None:
    return excess_of(fields, BOUNDS, CANDIDATES)


def chat(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


SCHEMA = {"type": "object", "properties": {"a" * 300: {"type": "string"}}}
SMALL = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"request_id": "x" * (NAME_CHARACTERS + 1)}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"session_id": "x" * 2_000_000}, "session_id"),
        ({"cache_salt": "x" * (SALT_CHARACTERS + 1)}, "cache_salt"),
        ({"structured_outputs": {"choice": ["x"] * 6}}, "max-choices"),
        ({"structured_outputs": {"regex": "x" * 21}}, "max-regex-bytes"),
        ({"structured_outputs": {"regex": "é" * 11}}, "max-regex-bytes"),
        ({"structured_outputs": {"grammar": "x" * 200}}, "max-grammar-bytes"),
        ({"structured_outputs": {"json": SCHEMA}}, "max-grammar-bytes"),
        ({"structured_outputs": {"choice": ["x" * 100] * 3}}, "max-grammar-bytes"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "max-grammar-bytes"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "max-grammar-bytes"),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "max-grammar-bytes"),
        ({"stop": ["x"] * 5}, "max-words"),
        ({"bad_words": ["x"] * 5}, "max-words"),
        ({"stop_token_ids": [1] * 5}, "max-words"),
        ({"stop_sequences": ["x"] * 5}, "max-words"),
        ({"logprob_token_ids": [1, 2, 3, 4]}, "max-candidates"),
        ({"messages": chat(TEXT, IMAGE)}, "multimodal"),
        ({"messages": [chat(IMAGE)]}, "multimodal"),
        ({"messages": chat({"image_url": "http://x/"})}, "multimodal"),
        ({"messages": chat({"type": "text", "text": "a", "uuid": "u", "image_url": "http://x/"})}, "multimodal"),
        ({"messages": chat({"type": "image", "source": {"type": "url", "url": "http://x/"}})}, "multimodal"),
        ({"messages": chat({"type": "tool_result", "content": [{"type": "image"}]})}, "multimodal"),
        ({"input": [{"type": "message", "content": [{"type": "input_image", "image_url": "x"}]}]}, "multimodal"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]}, "multimodal"),
        ({"input": [{"type": "computer_call_output", "output": {"image_url": "http://x/"}}]}, "multimodal"),
    ],
)
def test_what_is_too_much_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    found = excess(**fields)
    assert found is not None
    assert names in found.message
    assert len(found.message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"request_id": "x" * NAME_CHARACTERS, "session_id": "", "cache_salt": None},
        {"cache_salt": "x" * SALT_CHARACTERS},
        {"structured_outputs": {"choice": ["x"] * 5, "regex": None}},
        {"structured_outputs": {"regex": "x" * 20}},
        {"response_format": {"type": "json_object"}, "text": {"format": {"type": "text"}}},
        {"response_format": {"json_schema": {"schema": SMALL}}, "structured_outputs": None},
        {"stop": "x" * 5000, "bad_words": [], "stop_token_ids": None},
        {"logprob_token_ids": [1, 2, 3]},
        {"messages": chat(TEXT, {"type": "refusal", "refusal": "no"}), "input": "text", "system": "text"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"image_url": 1}'}}]}]},
        {"messages": chat({"type": "tool_use", "name": "show", "input": {"image_url": "http://x/"}})},
        {"messages": [{"role": "user", "content": "image_url"}], "input": [{"role": "user", "content": "audio"}]},
        {"messages": "nonsense", "structured_outputs": [], "text": 5, "stop": 7, "request_id": 5},
    ],
)
def test_what_is_within_is_let_through(fields: dict[str, Any]) -> None:
    assert excess(**fields) is None


def test_as_many_candidates_as_one_likes() -> None:
    assert excess_of({"logprob_token_ids": [0] * 500}, BOUNDS, -1) is None


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
known = st.sampled_from(
    ["request_id", "structured_outputs", "choice", "regex", "text", "format", "messages", "content", "type", "stop"]
)
bodies = st.dictionaries(known, st.recursive(any_json, lambda inner: st.dictionaries(known, inner, max_size=3)))


@given(bodies)
def test_any_body_is_judged_without_an_exception(fields: dict[str, Any]) -> None:
    found = excess(**fields)
    assert found is None or isinstance(found, Excess)


@given(st.lists(st.sampled_from([TEXT, IMAGE]), max_size=6), st.integers(0, 4))
def test_media_are_found_wherever_a_message_may_have_them(parts: list[Any], depth: int) -> None:
    content: Any = parts
    for _ in range(depth):
        content = [{"type": "tool_result", "content": content}]
    assert (excess(messages=[{"content": content}]) is not None) is (IMAGE in parts)


@pytest.mark.parametrize("name", ["inputs", "query", "queries", "text_1", "text_2", "data_1", "data_2"])
def test_media_are_found_in_inputs_of_pooling_models(name: str) -> None:
    assert excess(**{name: {"content": [TEXT]}}) is None
    assert excess(**{name: [{"content": [TEXT, IMAGE]}]}) is not None


def test_documents_may_have_media_in_a_conversation_alone() -> None:
    """There, the model is told of them as the template likes; scores would be computed of them."""
    assert excess(documents=[{"content": [IMAGE]}], messages=chat(TEXT)) is None
    assert excess(documents=[{"content": [IMAGE]}], query="which?") is not None
    assert excess(images=["https://example.org/a.png"]) is not None


def test_a_body_may_nest_as_deeply_as_it_likes() -> None:
    content: Any = "end"
    for _ in range(50_000):
        content = [{"content": content}]
    assert excess(messages=content) is None
    assert excess(structured_outputs={"json": content}) is not None


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"prompt": "' + b"x" * 1000 + b'"}', "max-tokenize-bytes"),
        (json.dumps({"messages": chat(IMAGE)}).encode(), "multimodal"),
        (json.dumps({"request_id": "x" * 300}).encode(), "request_id"),
        (json.dumps({"messages": chat(IMAGE), "x": float("nan")}).encode(), "multimodal"),
        (json.dumps({"messages": chat(IMAGE)}).encode("utf-16"), "multimodal"),
    ],
)
def test_a_request_that_generates_nothing_has_bounds_too(body: bytes, names: str) -> None:
    found = fields_of_text(body, BOUNDS)
    assert isinstance(found, Excess)
    assert names in found.message


@pytest.mark.parametrize("body", [b'{"prompt": "hello"}', b"", b"[1]", b"\xff", b"[" * 900, b'{"messages": '])
def test_what_is_within_the_bounds_or_nothing_is_the_servers_to_judge(body: bytes) -> None:
    assert fields_of_text(body, BOUNDS) == ({"prompt": "hello"} if b"hello" in body else {})


def test_a_header_names_no_model() -> None:
    """vLLM's /invocations would take it in the place of the model that the gate has looked at."""
    found = excess_of_headers([(b"host", b"h"), (b"X-Amzn-SageMaker-Adapter-Identifier", b"pirate")])
    assert found is not None
    assert found.param == "model"


@pytest.mark.parametrize(("value", "fits"), [(b"abc-1", True), (b"x" * 257, False), (b"a\tb", False), (b"\xc3", False)])
def test_an_id_in_a_header_is_judged_as_one_in_a_body(value: bytes, fits: bool) -> None:
    headers = [(b"host", b"x" * 999), (b"X-Request-ID", value)]
    assert (excess_of_headers(headers) is None) is fits
