"""The priority of an HTTP request: what it asks for, if its caller may have that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import (
    UNLIMITED,
    WITHOUT_KEY,
    PriorityTerms,
    Refusal,
    priority_asked,
    terms_of,
)
from dynamo_local.core.keys.values import KeyTerms
from dynamo_local.core.priority.classes import MOST_PRIORITY

NUMBERS = st.integers(-MOST_PRIORITY, MOST_PRIORITY)
TERMS = st.builds(KeyTerms, name=st.just("a"), best_priority=st.none() | NUMBERS, default_priority=st.none() | NUMBERS)


@given(terms=TERMS, named=st.none() | st.integers() | st.floats(), header=st.none() | st.integers() | st.text())
def test_nobody_gets_a_better_priority_than_the_best(
    terms: KeyTerms, named: int | float | None, header: int | str | None
) -> None:
    text = b"" if header is None else str(header).encode()
    found = priority_asked({"priority": named}, text, terms_of(terms))
    if isinstance(found, Refusal):
        assert found.status in (400, 403)
    else:
        assert abs(found) <= MOST_PRIORITY
        assert terms.best_priority is None or found >= terms.best_priority


@given(number=NUMBERS)
def test_the_header_goes_before_the_field(number: int) -> None:
    assert priority_asked({"priority": 5}, f" {number:+} ".encode(), UNLIMITED) == number


@pytest.mark.parametrize("named", ["5", " 5 ", "+5", "5.0", 5.0, 5])
def test_the_field_is_read_as_by_the_server_behind(named: Any) -> None:
    assert priority_asked({"priority": named}, b"", UNLIMITED) == 5


@pytest.mark.parametrize("named", ["", "low", "1_0", "1.5", 1.5, [1], {}, 2**31, -(2**31), 1e300])
def test_what_is_no_priority_is_refused(named: Any) -> None:
    found = priority_asked({"priority": named}, b"", UNLIMITED)
    assert isinstance(found, Refusal)
    assert (found.status, found.param) == (400, "priority")


@pytest.mark.parametrize("text", [b"low", b"1_0", b"1.0", b"1,1", b"\xd9\xa1", b"-", b"9" * 30])
def test_a_header_that_is_no_number_is_refused(text: bytes) -> None:
    found = priority_asked({}, text, WITHOUT_KEY)
    assert isinstance(found, Refusal)
    assert (found.status, found.param) == (400, None)


@pytest.mark.parametrize(
    ("terms", "default"),
    [
        (WITHOUT_KEY, 0),
        (UNLIMITED, 0),
        (terms_of(KeyTerms(name="a", best_priority=-3)), 0),
        (terms_of(KeyTerms(name="a", best_priority=3)), 3),
        (terms_of(KeyTerms(name="a", best_priority=-3, default_priority=-2)), -2),
    ],
)
def test_a_request_that_names_none_gets_the_default(terms: PriorityTerms, default: int) -> None:
    for fields in ({}, {"priority": None}):
        assert priority_asked(fields, b"", terms) == default
