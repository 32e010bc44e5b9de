"""How fast tokens come, and how such times are counted."""

from __future__ import annotations

from dynamo_local.core.histogram import Histogram
from dynamo_local.core.request.recovery import Pace


def test_a_pace_is_the_median_of_the_last_steps() -> None:
    pace = Pace()
    assert (pace.last, pace.step_s) == (None, None)
    pace.note(1.0)
    assert (pace.last, pace.step_s) == (1.0, None)
    for now in (3.0, 4.0, 5.0, 15.0):
        pace.note(now)
    assert (pace.last, pace.step_s) == (15.0, 1.5)


def test_a_pace_forgets() -> None:
    pace = Pace()
    for now in [float(10 * n) for n in range(40)] + [400.0 + n for n in range(40)]:
        pace.note(now)
    assert pace.step_s == 1.0


def test_a_histogram_counts_up_to_its_bounds_and_beyond() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.2, 5.0):
        histogram.observe(value)
    assert histogram.cumulative == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert histogram.sum == 5.35
