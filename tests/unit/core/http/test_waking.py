"""When endpoints are woken for requests, and what those are told who wait."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.http.waiting import AGAIN_S, Asking, Unready, idle_as, is_waking, judged, may_be_tried
from dynamo_local.core.messages.endpoints import EndpointState, EndpointStatus, EndpointView

ASLEEP = Unready("endpoint a is asleep")
FAILED = Unready("endpoint a is failed: no device", comes=False)
REFUSAL = "memory is short; end endpoint b"

times = st.floats(0, 1e6)


def view(state: EndpointState, min_workers: int = 0) -> EndpointView:
    return EndpointView(EndpointSpec(name="a", model="m", min_workers=min_workers), EndpointStatus(state), 0, 0)


@pytest.mark.parametrize("state", get_args(EndpointState))
@pytest.mark.parametrize("min_workers", [0, 1])
@pytest.mark.parametrize("parked", [False, True])
def test_only_what_gets_a_worker_by_being_asked_for_is_idle(
    state: EndpointState, min_workers: int, parked: bool
) -> None:
    """One that starts, waits or is deleted is not; where the board still says "ready", the workers tell."""
    found = idle_as(view(state, min_workers), parked=parked)
    if state in ("parked", "asleep"):
        assert found == state
    elif state in ("ready", "updating"):
        assert found == ("parked" if parked else "asleep" if min_workers == 0 else None)
    else:
        assert found is None


def test_a_start_is_asked_for_only_where_it_may_be_given_up() -> None:
    coming = {state for state in get_args(EndpointState) if is_waking(view(state))}
    assert coming == {"waiting", "fetching", "starting", "waking"}
    assert {state for state in get_args(EndpointState) if is_waking(view(state, 1))} == {"waking"}
    assert not is_waking(None)


def test_only_an_endpoint_that_may_be_idle_is_tried_again() -> None:
    assert may_be_tried(view("failed"))
    assert not may_be_tried(view("failed", 1))
    assert not may_be_tried(view("deleting"))
    assert not may_be_tried(None)
    assert idle_as(None, parked=True) is None


@given(times, st.floats(0, 5))
def test_a_refusal_is_the_answer_to_all_for_a_second(at: float, later_s: float) -> None:
    refused = Asking().begun(at).answered(REFUSAL, at)
    now = at + later_s
    told = judged(ASLEEP, refused, now)
    if refused.is_recent(now):
        assert told == Unready(REFUSAL, comes=False)
    else:
        assert later_s >= AGAIN_S * 0.999
        assert told == ASLEEP


@given(times, st.floats(0, 5))
def test_who_comes_after_a_failure_hopes_while_the_server_is_asked_and_has_agreed(at: float, later_s: float) -> None:
    now = at + later_s
    assert not judged(FAILED, Asking(), now).comes
    asked = Asking().begun(at)
    assert judged(FAILED, asked, now).comes
    granted = asked.answered("", at)
    assert judged(FAILED, granted, now).comes is granted.is_recent(now)
    assert not judged(FAILED, asked.unanswered("no server", at), now).comes


def test_a_server_that_does_not_answer_is_told_of_until_it_does() -> None:
    silent = Asking().begun(1.0).unanswered("the server does not answer", 1.5)
    for asking in (silent, silent.begun(2.5)):
        assert judged(ASLEEP, asking, 9.0) == Unready("endpoint a is asleep; the server does not answer")
    assert judged(ASLEEP, silent.begun(2.5).answered("", 2.6), 2.7) == ASLEEP
