"""Requests that are held: nobody waits longer than is set, nobody is told too early, and what is ready goes on."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.waiting import (
    BEGIN_AFTER_S,
    COMMENT_EVERY_S,
    GiveUp,
    Go,
    Held,
    HoldLimits,
    Unready,
    Wait,
    next_step,
    refused,
)

STARTING = Unready("endpoint a is starting")
FAILED = Unready("endpoint a is failed: no such model", comes=False, for_good=True)

times = st.floats(0, 10_000, allow_nan=False)
limits = st.builds(HoldLimits, hold_timeout_s=st.floats(0.01, 2000), max_held=st.integers(0, 10))


@given(st.booleans(), times, times, limits)
def test_a_request_goes_on_as_soon_as_its_model_is_ready(
    streams: bool, since: float, now: float, at: HoldLimits
) -> None:
    assert next_step(Held(1, since, streams), None, at, now) == Go()


@given(st.booleans(), times, times, limits)
def test_a_failed_start_ends_the_wait_with_its_reason(streams: bool, since: float, now: float, at: HoldLimits) -> None:
    assert next_step(Held(1, since, streams), FAILED, at, now) == GiveUp(FAILED.why, for_good=True)


@given(st.booleans(), times, limits, st.lists(st.floats(0, 50), max_size=30))
def test_the_wait_is_bounded_and_told_in_time(
    streams: bool, since: float, at: HoldLimits, early_s: list[float]
) -> None:
    """The caller looks when it is told to, or before that, because something has changed."""
    held, now, told = Held(1, since, streams), since, list[float]()
    looks = iter(early_s)
    while isinstance(step := next_step(held, STARTING, at, now), Wait):
        assert now < since + at.hold_timeout_s
        assert now <= step.until <= since + at.hold_timeout_s
        if step.tell:
            told.append(now)
            held.told_at = now
        now = max(now, min(step.until, now + next(looks, at.hold_timeout_s)))
        if len(told) > 5:
            break
    else:
        waited = f"the request has waited for {at.hold_timeout_s:g} s (setting hold-timeout-s)"
        assert step == GiveUp(f"{STARTING.why}; {waited}; send it again later")
        assert now >= since + at.hold_timeout_s
    assert streams or not told
    if told:
        assert told[0] >= since + BEGIN_AFTER_S
        assert all(after - before >= COMMENT_EVERY_S * 0.999 for before, after in itertools.pairwise(told))
    if streams and now > since + BEGIN_AFTER_S + COMMENT_EVERY_S:
        assert told


@given(limits, st.integers(0, 20))
def test_so_many_wait_and_no_more(at: HoldLimits, waiting: int) -> None:
    step = refused(STARTING, waiting, at, has_room=waiting < at.max_held)
    assert (step is None) is (waiting < at.max_held)
    assert step is None or (step.full and step.why.startswith(STARTING.why) and "(setting max-held)" in step.why)


@given(limits, st.integers(0, 20))
def test_nobody_is_held_for_what_does_not_come_or_where_holding_is_off(at: HoldLimits, waiting: int) -> None:
    assert refused(FAILED, waiting, at, has_room=True) == GiveUp(FAILED.why, for_good=True)
    assert refused(STARTING, waiting, replace(at, hold_timeout_s=0), has_room=True) == GiveUp(STARTING.why)
