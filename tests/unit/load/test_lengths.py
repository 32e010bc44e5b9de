"""Distributions of lengths."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload.lengths import Lengths, PowerLaw, Uniform, parse_lengths

bounds = st.tuples(st.integers(1, 5000), st.integers(0, 5000)).map(lambda pair: (pair[0], sum(pair)))


@given(bounds, st.floats(0.01, 20), st.integers())
def test_a_power_law_keeps_its_bounds(limits: tuple[int, int], exponent: float, seed: int) -> None:
    draw = random.Random(seed)
    law = PowerLaw(exponent, *limits)
    assert all(limits[0] <= law.draw(draw) <= limits[1] for _ in range(20))


@given(bounds, st.integers())
def test_a_range_keeps_its_bounds(limits: tuple[int, int], seed: int) -> None:
    assert limits[0] <= Uniform(*limits).draw(random.Random(seed)) <= limits[1]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.5])
def test_lengths_are_as_frequent_as_the_power_law_says(exponent: float) -> None:
    law = PowerLaw(exponent, 4, 400)
    draw = random.Random(0)
    drawn = Counter(law.draw(draw) < 20 for _ in range(40_000))[True] / 40_000

    def area(low: float, high: float) -> float:
        """Under x ** -exponent, by the midpoints of many strips."""
        width = (high - low) / 200_000
        return width * math.fsum((low + (index + 0.5) * width) ** -exponent for index in range(200_000))

    assert drawn == pytest.approx(area(4, 20) / area(4, 401), abs=0.01)


def test_both_ends_are_drawn() -> None:
    draw = random.Random(0)
    assert {PowerLaw(2.0, 1, 3).draw(draw) for _ in range(200)} == {1, 2, 3}
    assert {Uniform(1, 3).draw(draw) for _ in range(200)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("512", Uniform(512, 512)), ("100-2000", Uniform(100, 2000)), ("power:2.0:16-4000", PowerLaw(2.0, 16, 4000))],
)
def test_what_the_command_line_takes(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--input") == lengths


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "9-5", "1.5", "power:2", "power:0:1-9", "power:99:1-9", "x:1"])
def test_what_it_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--input"):
        parse_lengths(text, "--input")
