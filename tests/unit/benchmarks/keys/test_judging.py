"""The judge of limits: what is within them is not found guilty, and one request more is."""

from __future__ import annotations

import pytest

from benchmarks.keys.judging import Seen, judge, most_at_once


def even(number: int, every_s: float, lasts_s: float = 0.5) -> list[Seen]:
    return [Seen(at * every_s, at * every_s + 0.1, at * every_s + lasts_s) for at in range(number)]


def test_a_burst_and_the_rate_are_within_the_limit_and_one_more_is_not() -> None:
    burst = [Seen(0.0, 0.01, 0.02)] * 10
    assert judge(burst, tokens=28, requests_per_minute=10).over <= 0
    assert judge([*burst, burst[0]], tokens=28, requests_per_minute=10).over == pytest.approx(1, abs=0.01)
    assert judge(even(50, 6.0), tokens=28, requests_per_minute=10).over <= 0
    assert judge(even(50, 3.0), tokens=28, requests_per_minute=10).over > 5


def test_tokens_are_judged_as_requests_of_so_many() -> None:
    burst = [Seen(0.0, 0.01, 0.02)] * 10
    assert judge(burst, tokens=28, tokens_per_minute=280).over <= 0
    assert judge(burst, tokens=28, tokens_per_minute=252).over == pytest.approx(1, abs=0.01)


def test_requests_at_once_are_those_that_certainly_overlap() -> None:
    assert most_at_once(even(5, 1.0)) == 1
    assert most_at_once(even(5, 0.3, lasts_s=0.5)) == 2
    assert judge(even(5, 0.3), tokens=28, requests_at_once=1).over_at_once == 1
