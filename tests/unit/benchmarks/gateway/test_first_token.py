"""Phases that leave nothing to chance."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.gateway.first_token import Pair, Turn, phases


@pytest.mark.parametrize("count", [8, 32, 64, 1024])
def test_the_phases_cover_a_step_evenly(count: int) -> None:
    taken = sorted(islice(phases(), count))
    assert taken[0] > 0
    assert taken[-1] < 1
    gaps = [later - earlier for earlier, later in zip((0.0, *taken), (*taken, 1.0), strict=True)]
    assert max(gaps) <= 2 / count + 1e-9
    assert sum(taken) / count == pytest.approx(0.5, abs=1 / count)


def test_what_is_added_is_the_difference_of_the_means() -> None:
    ours, theirs = Turn((0.2, 0.4), 0.1, 0.0), Turn((0.1, 0.3, 0.2), 0.1, 0.3)
    pair = Pair(ours, theirs)
    assert pair.added_s == pytest.approx(0.1)
    assert pair.foreign_cores == 0.3
