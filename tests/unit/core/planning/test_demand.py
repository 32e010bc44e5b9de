"""The highest demand of a window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.planning.memory import Demand

steps = st.lists(st.tuples(st.floats(0.1, 20), st.none() | st.integers(0, 100)), min_size=1, max_size=30)


@given(steps, st.floats(0, 60))
def test_the_highest_reading_of_the_window_counts(readings: list[tuple[float, int | None]], window_s: float) -> None:
    demand, now, known = Demand(), 0.0, []
    for step, number in readings:
        now += step
        demand = demand.read(now, number, window_s)
        if number is None:
            assert demand.most is None
            continue
        known.append((now, number))
        assert demand.most == max(each for at, each in known if at >= now - window_s)


def test_it_has_been_watched_since_the_last_gap() -> None:
    demand = Demand()
    for at in range(6):
        demand = demand.read(at, 1, 600)
    assert demand.watched_s == 5
    assert demand.read(14, 1, 600).watched_s == 14
    assert demand.read(9, None, 600).read(16, 1, 600).watched_s == 0
    assert demand.read(40, 1, 600, gap_s=60).watched_s == 40


def test_a_gap_forgets_no_peak() -> None:
    assert Demand().read(0, 9, 600).read(100, None, 600).read(200, 1, 600).most == 9
