"""Gaps of streams under faults: which are too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import TokenDelta
from tests.chaos.answers import Answer, Outcome, engines_died
from tests.chaos.faults import Kind
from tests.chaos.gaps import GapWatch, uncovered_s, waits_of
from tests.chaos.tasks import Task

SPANS = st.lists(st.tuples(st.floats(-10, 110), st.floats(0, 30)).map(lambda span: (span[0], sum(span))), max_size=8)


@given(SPANS)
def test_what_is_not_covered_is_the_rest(windows: list[tuple[float, float]]) -> None:
    left = uncovered_s(0.0, 100.0, windows)
    assert 0.0 <= left <= 100.0
    longest = max((min(end, 100.0) - max(begin, 0.0) for begin, end in windows), default=0.0)
    assert left <= 100.0 - max(longest, 0.0) + 1e-9
    assert left >= 100.0 - sum(end - begin for begin, end in windows) - 1e-9


class TestGaps:
    def test_a_gap_is_too_long_without_a_fault(self) -> None:
        watch = GapWatch(slack_s=1.0)
        watch.ended("r", "w1", 10.0, 12.0)
        assert watch.gaps.too_long_count == 1
        assert "no fault" in watch.gaps.too_long[0]

    def test_a_fault_at_its_place_accounts_for_it_and_no_other_does(self) -> None:
        watch = GapWatch(slack_s=1.0)
        watch.record_fault(Kind.KILL_WORKER, 10.0, 0.0, ["w1"])
        assert watch.lost("r", "w1", None) is Kind.KILL_WORKER
        watch.ended("r", "w2", 10.0, 13.0)
        assert watch.gaps.too_long_count == 0
        assert watch.gaps.longest_s == {Kind.KILL_WORKER.value: 3.0}
        watch.ended("other", "w2", 10.0, 13.0)
        assert watch.gaps.too_long_count == 1

    def test_a_fault_accounts_for_no_more_than_its_bound(self) -> None:
        watch = GapWatch(slack_s=1.0)
        watch.record_fault(Kind.FAIL_ENGINE, 10.0, 0.0, ["w1"])
        watch.lost("r", "w1", None)
        watch.ended("r", "w2", 10.0, 25.5)
        assert watch.gaps.too_long_count == 1

    def test_waiting_for_room_is_no_fault(self) -> None:
        watch = GapWatch(slack_s=1.0)
        watch.ended("r", "w1", 10.0, 30.0, waits=[(10.1, 29.9)])
        assert watch.gaps.too_long_count == 0

    def test_a_fault_of_everything_meets_every_stream(self) -> None:
        watch = GapWatch(slack_s=1.0)
        watch.record_fault(Kind.STOP_BUS, 10.0, 5.0, None)
        watch.ended("r", "w1", 9.9, 18.0)
        assert watch.gaps.too_long_count == 0


def test_waits_are_from_queued_or_preempted_to_scheduled() -> None:
    delta = TokenDelta("r", 1, 0, [1], events=((1, 5.0), (2, 6.0), (3, 7.0), (2, 9.0)))
    assert waits_of(delta) == [(5.0, 6.0), (7.0, 9.0)]


class TestDeadEngines:
    TASK = Task("r", [1], 3)

    def end(self, deaths: int) -> Outcome | None:
        answer = Answer(self.TASK, 0.0, deaths=deaths)
        error = "3 engines died while they worked on this request; it is not tried again"
        answer.take(TokenDelta("r", 4, 0, [], finish="error", error=error), 1.0)
        return answer.outcome

    def test_the_error_is_right_if_so_many_were_killed(self) -> None:
        assert self.end(deaths=3) is Outcome.ENGINES_DIED

    def test_it_is_a_failure_otherwise(self) -> None:
        assert self.end(deaths=2) is Outcome.ERROR

    def test_other_errors_are_not_taken_for_it(self) -> None:
        assert engines_died("no worker is ready") is None
