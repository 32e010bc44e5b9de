"""Rates of counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.monitor.scraping import WINDOW_S, Rates

TOKENS = ("worker", "tokens")


def test_a_counter_that_grows_evenly_has_that_rate_at_once_and_later() -> None:
    rates = Rates()
    for tick in range(60):
        now = 100 + tick / 2
        rates.note(TOKENS, tick * 10, now)
        if tick >= 2:
            assert rates.rate(TOKENS, now) == 20


def test_of_too_short_a_time_nothing_is_told() -> None:
    rates = Rates()
    assert rates.rate(TOKENS, 5.0) is None
    rates.note(TOKENS, 5, 5.0)
    rates.note(TOKENS, 500, 5.5)
    assert rates.rate(TOKENS, 5.5) is None


def test_a_counter_that_stands_still_and_is_not_read_again_comes_to_zero() -> None:
    rates = Rates()
    rates.note(TOKENS, 0, 0.0)
    rates.note(TOKENS, 100, 1.0)
    assert rates.rate(TOKENS, 2.0) == 50
    assert rates.rate(TOKENS, 1.0 + WINDOW_S) == 0


def test_work_after_a_long_rest_is_not_spread_over_the_rest() -> None:
    rates = Rates()
    rates.note(TOKENS, 0, 0.0)
    rates.note(TOKENS, 50, 100.0)
    assert rates.growth(TOKENS, 100.0) == 50
    assert rates.rate(TOKENS, 100.0) == 50 / WINDOW_S


def test_a_counter_that_begins_anew_is_no_negative_rate() -> None:
    rates = Rates()
    rates.note(TOKENS, 1000, 0.0)
    rates.note(TOKENS, 3, 2.0)
    assert rates.rate(TOKENS, 2.0) is None
    rates.note(TOKENS, 13, 4.0)
    assert rates.rate(TOKENS, 4.0) == 5


def test_what_is_forgotten_is_unknown() -> None:
    rates = Rates()
    for owner in ("one", "other"):
        rates.note((owner, "tokens"), 0, 0.0)
    rates.forget("one")
    assert rates.rate(("one", "tokens"), 2.0) is None
    assert rates.rate(("other", "tokens"), 2.0) == 0


@given(st.lists(st.tuples(st.floats(0.01, 9), st.integers(0, 100)), min_size=1, max_size=40))
def test_growth_is_never_more_than_all_and_never_less_than_nothing(steps: list[tuple[float, int]]) -> None:
    rates, now, value = Rates(), 0.0, 0
    rates.note(TOKENS, 0, now)
    for gap, grown in steps:
        now, value = now + gap, value + grown
        rates.note(TOKENS, value, now)
        growth = rates.growth(TOKENS, now)
        assert growth is None or 0 <= growth <= value
