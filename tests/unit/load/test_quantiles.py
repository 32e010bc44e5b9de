"""Quantiles, spreads, and the intervals of their ratios."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.load.results.quantiles import quantile, ratio_of_quantiles, resampled, spread

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


def test_quantiles_are_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([1.0, 2.0, 3.0], 1) == 3.0
    with pytest.raises(ValueError, match="no quantile"):
        quantile([], 0.5)


@given(values)
def test_a_spread_is_in_order_and_within_its_values(found: list[float]) -> None:
    measured = spread(found)
    assert measured is not None
    assert measured.count == len(found)
    assert min(found) <= measured.p50 <= measured.p90 <= measured.p95 <= measured.p99 <= measured.max == max(found)
    assert min(found) <= measured.mean <= max(found)


def test_nothing_measured_is_not_zero() -> None:
    assert spread([]) is None


def test_resampling_by_rank_is_resampling() -> None:
    found = sorted(random.Random(0).uniform(0, 1) for _ in range(30))
    draw = random.Random(1)
    by_rank = sorted(resampled(found, 0.9, draw) for _ in range(20_000))
    by_hand = sorted(sorted(draw.choices(found, k=30))[26] for _ in range(20_000))  # the 27th of 30
    for share in (0.05, 0.5, 0.95):
        # The replicates are values of the sample: at most a neighbour apart.
        place = int(share * 20_000)
        assert abs(found.index(by_rank[place]) - found.index(by_hand[place])) <= 1


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=30), st.floats(0.1, 10), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_run_that_takes_so_many_times_longer_has_that_ratio(found: list[float], factor: float, share: float) -> None:
    interval = ratio_of_quantiles(found, [value * factor for value in found], share, random.Random(0))
    assert interval is not None
    assert interval.estimate == pytest.approx(factor)
    assert interval.low <= interval.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(150):
        first, second = ([scale * draw.expovariate(1) for _ in range(200)] for scale in (1, 2))
        interval = ratio_of_quantiles(first, second, 0.9, draw)
        assert interval is not None
        held += interval.low <= 2 <= interval.high
    assert 132 <= held <= 150


def test_there_is_no_ratio_to_nothing() -> None:
    assert ratio_of_quantiles([], [1.0], 0.5, random.Random(0)) is None
    assert ratio_of_quantiles([1.0], [], 0.5, random.Random(0)) is None
    assert ratio_of_quantiles([0.0], [1.0], 0.5, random.Random(0)) is None
