"""Keys as they are ordered: whatever comes is terms or one line that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.keys.registry import FIELDS, check_overlap, read_terms
from dynamo_local.core.keys.values import KeyTerms

NOW = 1000.0


def test_all_fields() -> None:
    fields: dict[str, Any] = {
        "name": "alice",
        "endpoints": ["chat", "code", "chat"],
        "requests_per_minute": 60,
        "tokens_per_minute": 10_000,
        "requests_at_once": 4,
        "best_priority": -1,
        "default_priority": 3,
        "expires_in_s": 10,
        "admin": True,
    }
    assert read_terms(fields, NOW) == KeyTerms(
        name="alice",
        endpoints=("chat", "code"),
        requests_per_minute=60,
        tokens_per_minute=10_000,
        requests_at_once=4,
        best_priority=-1,
        default_priority=3,
        expires_at=1010.0,
        admin=True,
    )
    assert read_terms({"name": "a", "admin": None, "expires_at": None}, NOW) == KeyTerms(name="a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "a key is .*; write its fields"),
        ({}, "has no name; write name"),
        ({"name": "Alice Smith"}, "no name for a key; .* such as alice-smith"),
        ({"name": 5}, "the name of a key is 5"),
        ({"name": "api-key-file"}, "the keys in that file"),
        ({"name": "a", "request_per_minute": 5}, "has no field .*; did you mean requests_per_minute"),
        ({"name": "a", "requests_per_minute": 0}, "key a: requests_per_minute is 0; write a whole number from 1"),
        ({"name": "a", "requests_per_minute": True}, "requests_per_minute is True"),
        ({"name": "a", "tokens_per_minute": 1.5}, "tokens_per_minute is 1.5"),
        ({"name": "a", "requests_at_once": 10**6}, "from 1 to 65535"),
        ({"name": "a", "best_priority": 2, "default_priority": 1}, "default_priority 1 is better than best_priority 2"),
        ({"name": "a", "admin": "yes"}, "admin is .*; write true or false"),
        ({"name": "a", "endpoints": "chat"}, "endpoints is"),
        ({"name": "a", "endpoints": ["Chat"]}, "is no name for an endpoint"),
        ({"name": "a", "expires_at": NOW}, "is over already"),
        ({"name": "a", "expires_at": 2000, "expires_in_s": 5}, "both given"),
        ({"name": "a", "expires_in_s": float("nan")}, "expires_in_s is"),
    ],
)
def test_what_is_wrong_is_told(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_terms(fields, NOW)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=6))
def test_anything_is_terms_or_a_line(fields: dict[str, Any]) -> None:
    why, terms = "", KeyTerms(name="a")
    try:
        terms = read_terms(fields, NOW)
    except ConfigError as error:
        why = str(error)
    assert "\n" not in why
    assert terms.expires_at is None or terms.expires_at > NOW


def test_an_overlap_is_a_time() -> None:
    assert check_overlap(60) == 60.0
    for wrong in (-1, float("inf"), True, "1h", 10**9):
        with pytest.raises(ConfigError, match="overlap_s is"):
            check_overlap(wrong)
