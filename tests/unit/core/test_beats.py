"""Processes that share a clock wake up together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.beats import until_beat


@given(st.floats(0, 1e7), st.sampled_from([0.5, 1.0, 3.0]))
def test_all_processes_beat_at_the_same_moments(now: float, interval_s: float) -> None:
    left_s = until_beat(now, interval_s)
    assert 0 < left_s <= 1.1 * interval_s
    off_s = (now + left_s) % interval_s
    assert min(off_s, interval_s - off_s) < 1e-6
