"""Limits a minute: whatever is taken and given back when, no stretch of time has more than its share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.limits import WINDOW_S, Margin, give_back, margin_of, shown_time, take, wait_s

LIMITS = st.integers(1, 5000)
STEPS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(0, 300), st.floats(0, 1), st.floats(0, 90)), min_size=1, max_size=40
)
"""Seconds since the step before, amount asked for, the share of it that is used, and after how many seconds the rest is
given back."""


@given(LIMITS, STEPS)
def test_in_any_time_at_most_the_limit_and_what_the_rate_gives(
    limit: int, steps: list[tuple[float, int, float, float]]
) -> None:
    now, paid_at = 1000.0, 0.0
    used: list[tuple[float, int]] = []
    pending: list[tuple[float, int, float]] = []
    for pause_s, amount, share, later_s in steps:
        now += pause_s
        for due in sorted(pending):
            if due[0] <= now:
                pending.remove(due)
                paid_at = give_back(paid_at, due[0], due[1], limit, due[2])
        taken = take(paid_at, now, amount, limit)
        if taken is not None:
            paid_at = taken
            really = math.floor(amount * share)
            used.append((now, really))
            pending.append((now + later_s, amount - really, taken))
    for first, (start, _) in enumerate(used):
        total = 0
        for at, amount in used[first:]:
            total += amount
            assert total <= limit * (1 + (at - start) / WINDOW_S) + 1e-3


@given(LIMITS, st.lists(st.tuples(st.floats(0, 5), st.integers(0, 100)), max_size=30))
def test_who_waits_as_long_as_told_is_served(limit: int, steps: list[tuple[float, int]]) -> None:
    now, paid_at = 0.0, 0.0
    for pause_s, amount in steps:
        now += pause_s
        if (taken := take(paid_at, now, amount, limit)) is None and amount <= limit:
            assert wait_s(paid_at, now, amount, limit) > 0.0
            now += wait_s(paid_at, now, amount, limit)
            taken = take(paid_at, now, amount, limit)
        assert (taken is not None) is (amount <= limit)
        paid_at = paid_at if taken is None else taken
        assert margin_of(paid_at, now + margin_of(paid_at, now, limit).reset_s + 1e-6, limit).remaining == limit


@given(LIMITS, st.floats(0, 1e5), st.floats(0, 1e9))
def test_remaining_is_what_can_be_taken(limit: int, now: float, paid_at: float) -> None:
    seen = margin_of(paid_at, now, limit)
    assert 0 <= seen.remaining <= limit
    assert take(paid_at, now, seen.remaining, limit) is not None or seen.remaining == 0
    assert take(paid_at, now, seen.remaining + 2, limit) is None


@given(LIMITS, st.floats(0, 1e5), st.floats(allow_nan=True))
def test_a_number_of_another_clock_locks_nobody_out_for_more_than_an_hour(
    limit: int, now: float, paid_at: float
) -> None:
    assert wait_s(paid_at, now, 1, limit) <= 3600.0 + 1e-6


def test_what_is_too_large_is_never_granted() -> None:
    assert take(0.0, 0.0, 11, 10) is None
    assert wait_s(0.0, 0.0, 11, 10) == math.inf
    assert take(0.0, 0.0, 10, 10) is not None


def test_what_has_been_used_beyond_is_owed() -> None:
    owing = take(0.0, 100.0, 25, 10, forced=True)
    assert owing is not None
    assert margin_of(owing, 100.0, 10) == Margin(0, 150.0)
    assert take(owing, 100.0, 1, 10) is None
    assert wait_s(owing, 100.0, 1, 10) == pytest.approx(96.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0081, "9ms"), (0.12, "120ms"), (8.64, "8.64s"), (60, "1m0s"), (360, "6m0s")]
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert shown_time(seconds) == text
