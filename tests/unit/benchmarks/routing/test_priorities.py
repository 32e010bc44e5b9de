"""The requests of the benchmark of priorities."""

from __future__ import annotations

import itertools
from statistics import fmean, pstdev

import pytest

from benchmarks.routing.priorities import EACH, URGENT, VARIATIONS, drawn_arrivals


@pytest.mark.parametrize("variation", VARIATIONS)
def test_requests_come_in_bursts_have_the_lengths_and_a_tenth_is_urgent(variation: float) -> None:
    drawn = drawn_arrivals(variation, 1, 40_000, EACH)
    gaps = [after.at - before.at for before, after in itertools.pairwise(drawn)]
    assert fmean(gaps) == pytest.approx(1 / EACH, rel=0.15)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.15)
    lengths = sorted(each.prompt_tokens for each in drawn)
    assert fmean(lengths) == pytest.approx(128, rel=0.1)
    for share, length in ((0.5, 38), (0.8, 113), (0.95, 413), (0.99, 1_464)):
        assert lengths[int(share * len(lengths))] == pytest.approx(length, rel=0.15)
    assert fmean(each.priority == -1 for each in drawn) == pytest.approx(URGENT, rel=0.1)
