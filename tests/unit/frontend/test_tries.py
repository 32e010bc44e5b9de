"""When tasks whose answer is no result are tried again."""

from __future__ import annotations

from components.frontend.async_tasks.tries import Again, Tries

PATIENCE_S = 1000.0


def test_refusals_are_for_the_line_to_wait_and_end_with_patience() -> None:
    tries = Tries()
    tries.begin(0.0)
    tries.begin(500.0)
    for status in (429, 503):
        assert tries.note(status, 999.0, PATIENCE_S) == Again(0.0, is_refused=True)
        assert tries.note(status, 1000.0, PATIENCE_S) is None


def test_other_failures_are_for_the_task_to_wait_longer_each_time() -> None:
    tries = Tries()
    tries.begin(0.0)
    pauses = [again.pause_s for _ in range(3) if (again := tries.note(502, 1.0, PATIENCE_S)) and not again.is_refused]
    assert pauses == [0.5, 1.0, 2.0]
    assert tries.note(502, 1000.0, PATIENCE_S) is None


def test_the_third_fault_is_the_result_whatever_comes_between() -> None:
    tries = Tries()
    tries.begin(0.0)
    found = [tries.note(status, 1.0, PATIENCE_S) is None for status in (500, 429, 500, 502, 500)]
    assert found == [False, False, False, False, True]


def test_an_unknown_model_has_its_time_from_the_first_time_that_it_is_unknown() -> None:
    tries = Tries()
    tries.begin(0.0)
    assert tries.note(429, 500.0, PATIENCE_S) is not None
    assert tries.note(404, 600.0, PATIENCE_S) is not None
    assert tries.note(404, 719.0, PATIENCE_S) is not None
    assert tries.note(404, 720.0, PATIENCE_S) is None


def test_what_is_a_result_is_not_tried_again() -> None:
    for status in (200, 400, 401, 422):
        tries = Tries()
        tries.begin(0.0)
        assert tries.note(status, 0.0, PATIENCE_S) is None
