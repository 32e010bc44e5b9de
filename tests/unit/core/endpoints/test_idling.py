"""When endpoints are parked, asleep and awake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints import idling as idle
from dynamo_local.core.endpoints.idling import Activity, IdleTimes, Idling
from dynamo_local.core.endpoints.spec import EndpointSpec

ZERO = EndpointSpec(name="chat", model="m", min_workers=0, park_after_s=60, sleep_after_s=900)
ONE = EndpointSpec(name="chat", model="m")
TIMES = idle.times_of(ZERO)
IDLE = Activity(busy=False, ready=1, begun=True)
PARKED = Activity(busy=False, begun=True)
NONE = Activity(busy=False)


def awake(at: float = 0.0) -> Idling:
    return Idling(active_at=at)


def test_times_have_defaults_that_give_way_to_what_is_given() -> None:
    assert idle.times_of(ONE) == IdleTimes(None, None)
    assert idle.times_of(EndpointSpec(name="a", model="m", park_after_s=5)) == IdleTimes(5, None)
    assert idle.times_of(EndpointSpec(name="a", model="m", min_workers=0)) == IdleTimes(60, 900)
    assert idle.times_of(EndpointSpec(name="a", model="m", min_workers=0, sleep_after_s=30)) == IdleTimes(None, 30)


def test_without_requests_it_is_parked_and_then_asleep() -> None:
    assert idle.looked(awake(), TIMES, IDLE, 59.9).rest == "awake"
    parked = idle.looked(awake(), TIMES, IDLE, 60)
    assert (parked.rest, idle.reason(parked, 60)) == ("parked", "no request for 1 min; a request wakes it")
    assert idle.looked(parked, TIMES, PARKED, 899).rest == "parked"
    asleep = idle.looked(parked, TIMES, PARKED, 900)
    assert (asleep.rest, idle.reason(asleep, 900)) == ("asleep", "no request for 15 min; a request wakes it")


@pytest.mark.parametrize("seen", [Activity(busy=True, ready=1), Activity(busy=None, ready=1), Activity(False, 7, 1)])
def test_what_is_in_use_or_not_known_to_be_idle_does_not_rest(seen: Activity) -> None:
    used = idle.looked(awake(), TIMES, seen, 5000)
    assert (used.rest, used.active_at) == ("awake", 5000)


def test_it_starts_asleep_without_a_minimum_and_awake_with_one() -> None:
    assert idle.at_start(ZERO, 5).rest == "asleep"
    assert idle.at_start(ONE, 5).rest == "awake"


def test_it_is_waking_until_a_worker_is_ready_however_long_that_takes() -> None:
    waking = idle.woken(idle.at_start(ZERO, 0), 10, asked=True)
    assert (waking.rest, waking.waking_since) == ("awake", 10)
    later = idle.looked(waking, TIMES, Activity(busy=True, begun=True), 5000)
    assert later.waking_since == 10
    assert idle.woken(later, 5001, asked=True).waking_since == 10, "another order begins nothing"
    ready = idle.looked(later, TIMES, IDLE, 5002)
    assert (ready.rest, ready.waking_since, ready.active_at) == ("awake", None, 5002)


def test_it_goes_back_to_sleep_when_nobody_waits_before_anything_has_begun() -> None:
    asked = idle.woken(idle.at_start(ZERO, 0), 10, asked=True)
    assert idle.looked(asked, TIMES, NONE, 12).rest == "awake"
    assert idle.looked(asked, TIMES, NONE, 14).rest == "asleep"
    assert idle.looked(asked, TIMES, replace(NONE, busy=None), 14).rest == "awake"
    assert idle.looked(idle.woken(asked, 11, asked=False), TIMES, NONE, 500).rest == "awake", "its owner wants it"


def test_a_start_is_broken_off_when_all_who_waited_for_it_have_left() -> None:
    asked = idle.woken(idle.at_start(ZERO, 0), 10, asked=True)
    waiting, starting = Activity(busy=True, begun=True), Activity(busy=False, begun=True)
    waited = idle.looked(asked, TIMES, waiting, 20)
    assert idle.looked(waited, TIMES, starting, 21.9).rest == "awake", "a client may try again at once"
    at = idle.look_at(waited, TIMES)
    assert at == 22
    left = idle.looked(waited, TIMES, starting, at)
    assert (left.rest, left.why, left.waking_since) == ("asleep", "nobody waits for it any more", None)
    assert idle.woken(left, at, asked=True).rest == "awake", "the next request has it started again"
    again = idle.looked(idle.looked(waited, TIMES, starting, 21), TIMES, waiting, 21.5)
    assert idle.looked(again, TIMES, starting, 23).rest == "awake"


def test_a_start_goes_on_that_is_nearly_done_or_wanted_by_others() -> None:
    asked = idle.woken(idle.at_start(ZERO, 0), 10, asked=True)
    waited = idle.looked(asked, TIMES, Activity(busy=True, begun=True), 20)
    starting = Activity(busy=False, begun=True)
    assert idle.looked(waited, TIMES, replace(starting, nearly=True), 500).rest == "awake"
    assert idle.looked(waited, TIMES, replace(starting, busy=None), 500).rest == "awake"
    assert idle.looked(idle.woken(waited, 20, asked=False), TIMES, starting, 500).rest == "awake", "by its owner"
    assert idle.looked(waited, IdleTimes(None, None), starting, 500).rest == "awake", "by its schedule"
    # Requests that were refused are sent again.
    assert idle.looked(asked, TIMES, starting, 39).rest == "awake"
    assert idle.looked(asked, TIMES, starting, 41).rest == "asleep"


def test_a_failed_start_is_repeated_for_a_request_after_a_pause_and_at_once_for_its_owner() -> None:
    asleep = idle.at_start(ZERO, 0)
    failed = idle.wake_failed(idle.woken(asleep, 10, asked=True), "no memory", 11)
    assert (failed.rest, failed.failure(12)) == ("asleep", "no memory")
    assert idle.woken(failed, 12, asked=True) == failed
    assert idle.woken(failed, 12, asked=False).rest == "awake"
    after = idle.look_at(failed, TIMES)
    assert after is not None
    assert failed.failure(after) == ""
    assert "no memory" in idle.reason(failed, after)
    again = idle.woken(failed, after, asked=True)
    assert again.rest == "awake"
    twice = idle.wake_failed(again, "no memory", after)
    assert twice.may_wake_at - after > failed.may_wake_at - 11
    ready = idle.looked(again, TIMES, IDLE, after + 1)
    assert (ready.failures, ready.error) == (0, "")


def test_an_order_to_park_waits_for_requests_and_an_order_to_wake_takes_it_back() -> None:
    ordered = idle.ordered_to_rest(awake(), "parked")
    busy = idle.looked(ordered, TIMES, Activity(busy=True, ready=1), 5)
    assert (busy.rest, busy.pending) == ("awake", "parked")
    assert idle.looked(busy, TIMES, IDLE, 6).rest == "parked"
    assert idle.woken(busy, 6, asked=False).pending is None
    assert idle.ordered_to_rest(idle.at_start(ZERO, 0), "parked").rest == "asleep"


def test_a_request_that_reached_a_parked_worker_has_woken_it() -> None:
    parked = Idling("parked", "no request", 0)
    assert idle.looked(parked, TIMES, Activity(busy=True, ready=1), 5).rest == "awake"
    assert idle.looked(parked, TIMES, Activity(busy=False, ready=1), 5).rest == "parked", "it was started again"


@pytest.mark.parametrize(
    ("rest", "least", "anew", "after"),
    [
        ("asleep", 0, True, "asleep"),
        ("asleep", 1, False, "awake"),
        ("parked", 0, True, "asleep"),
        ("parked", 0, False, "parked"),
        ("parked", 1, True, "awake"),
    ],
)
def test_an_update_starts_no_worker_that_nobody_needs(rest: idle.Rest, least: int, anew: bool, after: str) -> None:
    spec = EndpointSpec(name="chat", model="m", min_workers=least)
    assert idle.changed(Idling(rest, "idle", 0), ZERO, spec, 5, runs_anew=anew).rest == after


looks = st.builds(Activity, st.sampled_from((None, True, False)), st.integers(0, 2), st.integers(0, 2), st.booleans())
orders = st.sampled_from(("ask", "wake", "park", "sleep", "fail", "yield"))


@given(st.lists(st.tuples(st.floats(0, 500), looks | orders), max_size=40))
def test_it_rests_only_with_a_reason_and_is_looked_at_again_in_time(happened: list[tuple[float, object]]) -> None:
    now, state = 0.0, idle.at_start(ZERO, 0.0)
    for later, what in happened:
        now += later
        before = state
        match what:
            case Activity():
                state = idle.looked(state, TIMES, what, now)
                if before.rest == "awake" and state.rest != "awake":
                    assert what.busy is False
            case "ask" | "wake":
                state = idle.woken(state, now, asked=what == "ask")
                assert state.rest == "awake" or before.failure(now)
            case "park":
                state = idle.ordered_to_rest(state, "parked")
            case "sleep":
                state = idle.ordered_to_rest(state, "asleep")
            case "fail":
                state = idle.wake_failed(state, "it fails", now)
            case "yield":
                state = idle.yielded(state, "code", now)
        assert (state.rest == "awake" and state.pending is None) == (idle.reason(state, now) == "")
        at = idle.look_at(state, TIMES)
        if at is not None and at > now:
            assert idle.looked(state, TIMES, replace(NONE, served=state.served), (now + at) / 2).rest in (
                state.rest,
                state.pending,
            )
