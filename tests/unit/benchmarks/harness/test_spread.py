"""Medians, quantiles and intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.spread import bootstrap, median, quantile

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def test_quantiles_are_interpolated() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([1.0, 2.0, 3.0], 0) == 1.0
    assert quantile([1.0, 2.0, 3.0], 1) == 3.0


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="no quantile"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="no estimate"):
        bootstrap([])


@given(values)
def test_the_quantile_of_one_half_is_the_median(given_values: list[float]) -> None:
    assert quantile(given_values, 0.5) == pytest.approx(median(given_values))


@given(values)
def test_an_interval_lies_within_the_values(given_values: list[float]) -> None:
    interval = bootstrap(given_values)
    assert min(given_values) <= interval.low <= interval.high <= max(given_values)


def test_an_interval_is_the_same_every_time() -> None:
    assert bootstrap([1.0, 2.0, 5.0]) == bootstrap([1.0, 2.0, 5.0])


def test_intervals_hold_the_truth_about_as_often_as_they_promise() -> None:
    draw = random.Random(1)
    intervals = [bootstrap([draw.gauss(10, 3) for _ in range(25)]) for _ in range(60)]
    hits = sum(interval.low <= 10 <= interval.high for interval in intervals)
    assert 50 <= hits <= 60
    # They promise something: with a spread of 3, the median of 25 values is known to about 0.75.
    assert all(interval.high - interval.low < 8 for interval in intervals)
