"""A worker that keeps failing is avoided for a while, and only then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet.view import BreakerRule, Breakers

RULE = BreakerRule(failures=3, window_s=10.0, open_s=5.0)


def test_enough_failures_in_the_window_open_it_for_a_while() -> None:
    breakers = Breakers(RULE)
    for now in (0.0, 4.0):
        breakers.failure("a", now)
        assert breakers.open(now) == ()
    breakers.failure("a", 10.0)
    assert breakers.open(10.0) == ("a",)
    assert breakers.open(14.9) == ("a",)
    assert breakers.open(15.0) == ()


def test_after_it_has_closed_failures_are_counted_anew() -> None:
    breakers = Breakers(RULE)
    for _ in range(3):
        breakers.failure("a", 0.0)
    assert breakers.open(6.0) == ()
    breakers.failure("a", 6.0)
    assert breakers.open(6.0) == ()


@given(st.lists(st.floats(5.1, 100.0), min_size=1, max_size=50))
def test_failures_that_are_far_apart_never_open_it(pauses: list[float]) -> None:
    breakers, now = Breakers(RULE), 0.0
    for pause in pauses:
        now += pause
        breakers.failure("a", now)
        assert breakers.open(now) == ()


def test_workers_are_judged_apart_and_forgotten_with_their_lease() -> None:
    breakers = Breakers(RULE)
    for _ in range(3):
        breakers.failure("a", 1.0)
        breakers.failure("b", 1.0)
    assert breakers.open(2.0) == ("a", "b")
    breakers.forget("a")
    assert breakers.open(2.0) == ("b",)
