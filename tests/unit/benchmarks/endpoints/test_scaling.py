"""When a load counts as served."""

from __future__ import annotations

from benchmarks.endpoints.scaling import Answered, Targets, served_after

TARGETS = Targets(ttft_s=1.0, itl_s=0.05)


def answers(*ttfts: float | None, itl_s: float = 0.02) -> list[Answered]:
    """Ten requests for each window of 5 s, all with this time to the first token."""
    return [
        Answered(5.0 * window + request / 2, ttft_s, itl_s)
        for window, ttft_s in enumerate(ttfts)
        for request in range(10)
    ]


def test_a_load_is_served_from_the_first_window_after_which_all_kept_the_targets() -> None:
    assert served_after(answers(2.0, 2.0, 0.5, 0.5), TARGETS, 20.0) == 10.0
    assert served_after(answers(0.5, 2.0, 0.5, 0.5), TARGETS, 20.0) == 10.0
    assert served_after(answers(0.5, 0.5), TARGETS, 10.0) == 0.0


def test_a_load_that_is_late_at_the_end_or_not_answered_is_not_served() -> None:
    assert served_after(answers(0.5, 0.5, 2.0), TARGETS, 15.0) is None
    assert served_after(answers(0.5, None), TARGETS, 10.0) is None
    assert served_after(answers(0.5, 0.5), TARGETS, 15.0) is None, "nobody asked in the last window"
    assert served_after(answers(0.5, 0.5, itl_s=0.06), TARGETS, 10.0) is None


def test_what_came_before_the_step_does_not_count() -> None:
    before = [Answered(-3.0, 9.0, 0.02)]
    assert served_after([*before, *answers(0.5)], TARGETS, 5.0) == 0.0
