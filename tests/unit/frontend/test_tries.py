"""When tasks whose answer is no result are tried again."""

from __future__ import annotations

from components.frontend.async_tasks.running import Outcome, Tries, outcome_of
from components.frontend.http.own_requests import Answered

PATIENCE_S = 1000.0
UNKNOWN, REFUSED = Answered(404, b""), Answered(429, b"")


def test_refusals_are_for_the_line_to_wait_and_end_with_patience() -> None:
    tries = Tries()
    tries.begin(0.0)
    tries.begin(500.0)
    for status in (429, 503):
        assert tries.note(Answered(status, b""), 999.0, PATIENCE_S) == 0.0
        assert tries.note(Answered(status, b""), 1000.0, PATIENCE_S) is None


def test_other_failures_are_for_the_task_to_wait_longer_each_time() -> None:
    tries = Tries()
    tries.begin(0.0)
    lost = Answered(502, b"")
    assert [tries.note(lost, 1.0, PATIENCE_S) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert tries.note(lost, 1000.0, PATIENCE_S) is None


def test_the_third_fault_is_the_result_whatever_comes_between() -> None:
    tries = Tries()
    tries.begin(0.0)
    found = [tries.note(Answered(status, b""), 1.0, PATIENCE_S) is None for status in (500, 429, 500, 502, 500)]
    assert found == [False, False, False, False, True]


def test_an_unknown_model_has_its_time_from_the_first_time_that_it_is_unknown() -> None:
    tries = Tries()
    tries.begin(0.0)
    assert tries.note(REFUSED, 500.0, PATIENCE_S) is not None
    assert tries.note(UNKNOWN, 600.0, PATIENCE_S) is not None
    assert tries.note(UNKNOWN, 719.0, PATIENCE_S) is not None
    assert tries.note(UNKNOWN, 720.0, PATIENCE_S) is None


def test_time_in_which_others_had_results_costs_no_patience() -> None:
    tries = Tries()
    tries.note_room(5.0)
    tries.begin(10.0)
    assert tries.note(REFUSED, 10.0, PATIENCE_S) == 0.0
    tries.note_room(5000.0)
    tries.begin(5500.0)
    assert tries.note(REFUSED, 5500.0, PATIENCE_S) == 0.0
    tries.note_room(5000.0)
    assert tries.note(REFUSED, 6000.0, PATIENCE_S) is None


def test_a_model_that_answered_others_meanwhile_becomes_unknown_anew() -> None:
    tries = Tries()
    tries.begin(0.0)
    assert tries.note(UNKNOWN, 0.0, PATIENCE_S) == 0.0
    tries.note_room(500.0)
    assert tries.note(UNKNOWN, 600.0, PATIENCE_S) == 0.0
    assert tries.note(UNKNOWN, 720.0, PATIENCE_S) is None


def test_what_is_a_result_is_not_tried_again() -> None:
    for status in (200, 400, 401, 422):
        tries = Tries()
        tries.begin(0.0)
        assert tries.note(Answered(status, b""), 0.0, PATIENCE_S) is None


def test_what_can_never_be_granted_is_a_result_that_tells_nothing_of_others() -> None:
    tries, never = Tries(), Answered(429, b"", is_final=True)
    tries.begin(0.0)
    assert tries.note(never, 0.0, PATIENCE_S) is None
    assert outcome_of(never) is Outcome.OTHER


def test_only_a_model_that_is_not_there_tells_that_others_would_be_refused() -> None:
    told = {status: outcome_of(Answered(status, b"")) for status in (200, 400, 429, 404, 503, 408, 500, 502)}
    assert [status for status, each in told.items() if each is Outcome.CLOSED] == [404, 503]
    assert [status for status, each in told.items() if each is Outcome.REFUSED] == [429]
    assert [status for status, each in told.items() if each is Outcome.ANSWERED] == [200, 400]
