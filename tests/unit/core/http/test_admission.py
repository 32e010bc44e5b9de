"""Admission of bodies. A body is either within the limits or refused; it is never let through unread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import (
    FORBIDDEN_FIELDS,
    AdmissionLimits,
    Demand,
    Refusal,
    examine_tokens,
    read_fields,
)
from dynamo_local.core.http.bounds.admission import examine as examine_fields

LIMITS = AdmissionLimits(max_prompts=8, max_n=4, max_candidates=5, max_requests=20)
NUMBERS = ("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs")
BOUNDS = {"n": 4, "best_of": 4, "logprobs": 5, "top_logprobs": 5, "prompt_logprobs": 5}


def examine(body: bytes, limits: AdmissionLimits) -> Demand | Refusal:
    fields = read_fields(body)
    return fields if isinstance(fields, Refusal) else examine_fields(fields, limits)


def judge(body: Any) -> Demand | Refusal:
    return examine(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)


def refused(body: Any) -> Refusal:
    refusal = judge(body)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    return refusal


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
bounded_fields = st.sampled_from([*NUMBERS, "prompt", *sorted(FORBIDDEN_FIELDS), "vllm_xargs"])


def _as_lenient_servers_read(value: Any) -> int:
    """Read as pydantic reads a field declared `int`; 0 for what it refuses."""
    try:
        number = float(value.replace("_", "") if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return 0 if not isinstance(value, int) else 2**63
    return int(number) if number == number and abs(number) != float("inf") else 0


@given(st.dictionaries(bounded_fields | st.text(max_size=6), any_json, max_size=6))
def test_nothing_beyond_the_limits_is_let_through(body: dict[str, Any]) -> None:
    """Read as leniently as the server behind reads: NaN included, digits in strings included."""
    text = json.dumps(body)
    judged = examine(text.encode(), LIMITS)
    if isinstance(judged, Refusal):
        assert judged.status == 400
        return
    seen = json.loads(text)
    assert all(_as_lenient_servers_read(seen.get(name)) <= BOUNDS[name] for name in NUMBERS)
    assert all(seen.get(name) is None for name in FORBIDDEN_FIELDS)
    prompts = seen.get("prompt")
    many = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
    assert not many or len(prompts) <= LIMITS.max_prompts
    assert 1 <= judged.sequences <= LIMITS.max_requests


@given(st.binary(max_size=100))
def test_any_bytes_are_judged_without_an_exception(body: bytes) -> None:
    judged = judge(body)
    assert isinstance(judged, Demand) or judged.status == 400


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"text"', id="string"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"n": 1', id="cut off"),
        pytest.param(b'{"n": 1} {}', id="two"),
        pytest.param(b'{"n": 100, "temperature": NaN}', id="NaN"),
        pytest.param(b'{"n": 100, "temperature": Infinity}', id="infinity"),
        pytest.param(b'{"n": 100, "temperature": 1e999}', id="number beyond range"),
        pytest.param(b'{"n": 100, "user": "\\ud800"}', id="lone surrogate"),
        pytest.param('{"n": 100}'.encode("utf-16"), id="utf-16"),
        pytest.param(b'{"n": 1, "user": "\xff"}', id="not utf-8"),
        pytest.param(b'{"n": 1, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="nested without end"),
        pytest.param(b'{"a":' * 100_000, id="nested and cut off"),
    ],
)
def test_what_cannot_be_read_is_refused_here(body: bytes) -> None:
    """The server behind reads some of these, and would then serve n = 100."""
    assert "not a JSON object" in refused(body).message


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b'{"temperature": NaN}', "JSON has no NaN and no Infinity"),
        (b'{"temperature": -Infinity}', "JSON has no NaN and no Infinity"),
        (b'{"user": "\\uD800"}', "in pairs"),
    ],
)
def test_what_other_readers_take_is_refused_with_a_hint(body: bytes, hint: str) -> None:
    assert hint in refused(body).message


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_bounded(name: str) -> None:
    bound = BOUNDS[name]
    assert isinstance(judge({name: bound}), Demand)
    assert isinstance(judge({name: None}), Demand)
    for value in (bound + 1, float(bound + 1), 2**64, 10**400, 1e300):
        refusal = refused({name: value})
        assert refusal.param == name
        assert f"at most {bound}" in refusal.message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["100", " 100 ", "+100", "0100", "100.0", "100.00", "-2"])
def test_digits_in_a_string_are_a_number(name: str, value: str) -> None:
    """The server behind reads them so."""
    if not (name in ("n", "best_of") and value == "-2"):  # which is for the server behind to refuse
        refusal = refused({name: value})
        assert (refusal.param, str(int(float(value))) in refusal.message) == (name, True)
    assert isinstance(judge({name: "1"}), Demand)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [" 1_00 ", "1e2", "x", "", "1.5", "\u0661", "\u20033", "9" * 5000, "nan", "0x64"])
def test_other_strings_are_no_number(name: str, value: str) -> None:
    assert refused({name: value}).param == name


def test_numbers_in_strings_are_counted() -> None:
    assert judge({"prompt": ["a", "b"], "n": "3"}) == Demand(6)


@pytest.mark.parametrize("name", ["logprobs", "top_logprobs", "prompt_logprobs"])
def test_the_whole_vocabulary_is_to_be_had_only_where_that_is_set(name: str) -> None:
    for value in (-1, "-1", -1.0):
        refusal = refused({name: value})
        assert (refusal.param, "max-candidates" in refusal.message) == (name, True)
        assert examine(json.dumps({name: value}).encode(), AdmissionLimits(max_candidates=-1)) == Demand(1)
    assert examine(json.dumps({name: 5000}).encode(), AdmissionLimits(max_candidates=-1)) == Demand(1)
    assert isinstance(examine(json.dumps({name: -2}).encode(), AdmissionLimits(max_candidates=-1)), Refusal)


@pytest.mark.parametrize("value", [True, False, [1], {"n": 1}, None])
def test_other_types_are_left_to_the_server_behind(value: Any) -> None:
    """No server takes these for more than one sequence. `logprobs: true` is how chat asks for them."""
    assert judge({"n": value, "logprobs": value}) == Demand(1)


def test_the_last_of_two_equal_keys_counts() -> None:
    """Numbers as Python's reader takes them, which the server behind uses."""
    assert refused(b'{"n": 1, "n": 100}').param == "n"
    assert judge(b'{"n": 100, "n": 2}') == Demand(2)
    assert refused(b'{"\\u006e": 100}').param == "n"


@pytest.mark.parametrize("name", sorted(FORBIDDEN_FIELDS))
@pytest.mark.parametrize("value", [{"do_remote_prefill": True}, {}, [], 0, "", False])
def test_fields_that_steer_the_machinery_are_refused(name: str, value: Any) -> None:
    assert refused({"prompt": "a", name: value}).param == name
    assert refused({"prompt": "a", "vllm_xargs": {name: value}}).param == name
    assert judge({"prompt": "a", name: None}) == Demand(1)


def test_extra_arguments_of_other_names_pass() -> None:
    assert judge({"vllm_xargs": {"mine": 1}}) == Demand(1)
    assert judge({"vllm_xargs": "kv_transfer_params"}) == Demand(1)


@pytest.mark.parametrize(
    ("prompt", "sequences"),
    [("text", 1), ([1, 2, 3] * 10, 1), ([], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), (None, 1), (7, 1)],
)
def test_prompts_are_counted(prompt: Any, sequences: int) -> None:
    assert judge({"prompt": prompt}) == Demand(sequences)
    assert judge({"prompt": prompt, "n": 3}) == Demand(3 * sequences)
    assert judge({"prompt": prompt, "n": 2, "best_of": 3}) == Demand(3 * sequences)


def test_prompts_are_bounded() -> None:
    assert refused({"prompt": ["a"] * 9}).param == "prompt"
    assert refused({"prompt": [[1]] * 9}).param == "prompt"


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 30}, 1),
        ({"messages": [[{"role": "user", "content": "a"}]] * 3, "n": 2}, 6),
        ({"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}, 2),
        ({"query": "a", "items": [[1], [2], [3]], "label_token_ids": [1, 2]}, 3),
        ({"query": [1] * 70_000, "items": [[1], [2] * 70_000], "label_token_ids": [1, 2]}, 2),
        ({"messages": [{"role": "user", "content": "a"}], "items": ["b"] * 99}, 1),
        ({"prompt": ["a", "b"], "messages": [[1], [2], [3]]}, 3),
    ],
)
def test_conversations_and_items_are_prompts(body: dict[str, Any], sequences: int) -> None:
    assert judge(body) == Demand(sequences)


@pytest.mark.parametrize(
    ("body", "param", "setting"),
    [
        ({"messages": [[{"role": "user", "content": "a"}]] * 9}, "messages", "max-prompts"),
        ({"query": "a", "items": ["b"] * 9, "label_token_ids": [1]}, "items", "max-prompts"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1] * 6}, "label_token_ids", "max-candidates"),
        ({"query": "a" * 40_000, "items": ["b" * 30_000], "label_token_ids": [1]}, "items", "max-scored-characters"),
        ({"prompt": ["a"] * 9}, "prompt", "max-prompts"),
        ({"n": 5}, "n", "max-n"),
        ({"best_of": 5}, "best_of", "max-n"),
        ({"logprobs": 6}, "logprobs", "max-candidates"),
        ({"prompt": ["a"] * 8, "n": 3}, "n", "max-requests"),
    ],
)
def test_what_exceeds_a_bound_is_told_which_setting_it_is(body: dict[str, Any], param: str, setting: str) -> None:
    refusal = refused(body)
    assert (refusal.param, f"(setting {setting})" in refusal.message) == (param, True)


def test_bounds_can_be_raised() -> None:
    """Limits, each of them alone, and max-requests with them."""
    wide = AdmissionLimits(max_n=100, max_prompts=500, max_candidates=50, max_requests=5000)
    assert examine(b'{"n": 100, "logprobs": 50}', wide) == Demand(100)
    assert examine(json.dumps({"prompt": ["a"] * 500, "n": 10}).encode(), wide) == Demand(5000)


def test_a_demand_that_can_never_be_met_is_not_told_to_come_back() -> None:
    refusal = refused({"prompt": ["a"] * 8, "n": 3})
    assert "at most 20 (setting max-requests), got 24" in refusal.message
    assert refusal.retry_after_s is None


def test_a_refusal_has_the_shape_of_openai() -> None:
    body = json.loads(Refusal(429, "busy", "RateLimitError", param="n").body())
    assert body == {"error": {"message": "busy", "type": "RateLimitError", "param": "n", "code": 429}}


@pytest.mark.parametrize("value", [5, "x", True, {"a": 1}])
@pytest.mark.parametrize("name", ["messages", "tools", "structured_outputs"])
def test_fields_that_the_server_behind_cannot_read_are_told(name: str, value: Any) -> None:
    """It would say that an int cannot be iterated, or fail."""
    if name == "structured_outputs" and isinstance(value, dict):
        value = ["x"]
    refusal = refused({name: value})
    assert (refusal.param, f"{name} must be a" in refusal.message) == (name, True)


def test_fields_that_are_null_are_not_given_but_for_messages() -> None:
    assert refused({"messages": None}).message == "messages must be a list of messages, got null"
    for fields in ({"messages": None, "prompt": "x"}, {"messages": 5, "input": "x"}, {"tools": None}):
        assert isinstance(judge(fields), Demand)
    assert isinstance(judge({"structured_outputs": None, "tools": []}), Demand)


@pytest.mark.parametrize("tokens", [[9], [0, 9], [], None, "x", ["x"], [[1]], [None], 5, {}, [-1]])
def test_tokens_of_the_vocabulary_and_what_is_no_list_of_them_pass(tokens: Any) -> None:
    assert examine_tokens({"tokens": tokens}, 10) is None
    assert examine_tokens({}, 10) is None
    assert examine_tokens({"tokens": [10**9]}, None) is None


@pytest.mark.parametrize("tokens", [[10], [3, 10**9, 2], [10**4000]])
def test_tokens_beyond_the_vocabulary_are_refused(tokens: list[int]) -> None:
    refusal = examine_tokens({"tokens": tokens}, 10)
    assert refusal is not None
    assert (refusal.status, refusal.param, "0 to 9" in refusal.message) == (400, "tokens", True)
    assert len(refusal.message) < 100
