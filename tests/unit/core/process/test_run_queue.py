from __future__ import annotations

import pytest

from dynamo_local.core.process.soft_binding import ThreadTimes, shares_between, waited_between


def times(ran_s: float, waited_s: float, *, runnable: bool = True, core: int = 0) -> ThreadTimes:
    return ThreadTimes(ran_s, waited_s, runnable, core)


@pytest.mark.parametrize(
    ("before", "after", "waited_s"),
    [
        (times(1, 5), times(1.2, 5.8), 0.8),
        # It waits still: the kernel adds that when it ends,
        (times(1, 5), times(1, 5), 1.0),
        # and then there is more of it than there was time since the last look.
        (times(1, 5), times(1.1, 9), 1.0),
        # It sleeps, has been stopped, or falls asleep or wakes up at this moment.
        (times(1, 5, runnable=False), times(1, 5, runnable=False), 0.0),
        (times(1, 5), times(1, 5, runnable=False), 0.0),
        (times(1, 5, runnable=False), times(1, 5), 0.0),
        # It computes.
        (times(1, 5), times(2, 5), 0.0),
    ],
)
def test_waiting_is_told_from_sleep_and_from_work(before: ThreadTimes, after: ThreadTimes, waited_s: float) -> None:
    assert waited_between(before, after, 1.0) == pytest.approx(waited_s)


def test_threads_are_added_up_new_ones_included_and_ended_ones_left_out() -> None:
    before = {1: times(1, 1), 2: times(4, 4)}
    after = {1: times(1.5, 1.25), 3: times(0.25, 0.5, core=1)}
    shares = shares_between(before, after, 1.0)
    assert shares.waited_s == pytest.approx(0.75)
    assert shares.ran_s == {0: pytest.approx(0.5), 1: pytest.approx(0.25)}
