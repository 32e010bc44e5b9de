"""Policies `freeness` and `concurrency`."""

from __future__ import annotations

import pytest

from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import AddWorker, RemoveWorker
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Fleet, Window, aggregate
from tests.unit.core.planning.fleets import AGGREGATED, decision_of, prefiller, pull, reason_of, worker

FREENESS = PlannerOptions(policy="freeness")
CONCURRENCY = PlannerOptions(policy="concurrency", concurrency_window=60.0)
ADD = (AddWorker("aggregated", "VllmWorker"),)


def fleet(*kv_and_running: tuple[float, int], waiting: int = 0, at: float = 0.0) -> Fleet:
    workers = [
        worker(f"VllmWorker_{index}", "aggregated", kv, running=running, waiting=waiting)
        for index, (kv, running) in enumerate(kv_and_running, 1)
    ]
    return pull(*workers, templates=AGGREGATED, queue=None, at=at)


def test_workers_that_are_not_free_for_long_enough_get_another_one() -> None:
    # (1 - 0.95) x 32768 tokens / 40 requests: 41 steps.
    assert decision_of(fleet((0.95, 40)), FREENESS).actions == ADD
    assert decision_of(fleet((0.95, 40)), FREENESS, history=()).actions == ()
    other = aggregate([fleet((0.95, 40), (0.95, 40))])
    assert decision_of(fleet((0.95, 40)), FREENESS, history=(other,)).actions == ()


def test_the_head_of_the_queue_counts() -> None:
    decision = decision_of(fleet((0.85, 20), waiting=2), FREENESS)
    assert decision_of(fleet((0.85, 20)), FREENESS).actions == ()
    # 20 requests use 27852 tokens; the first of the two that wait needs 4096.
    assert decision.verdicts[0].figures["freeness"] == pytest.approx((32768 - 27852.8 - 4096) / 20)


def test_of_workers_that_are_free_the_one_with_fewest_requests_goes() -> None:
    found = fleet((0.1, 3), (0.1, 2), (0.1, 9))
    assert decision_of(found, FREENESS).actions == (RemoveWorker("ns_VllmWorker_2", "aggregated"),)


def test_of_several_with_as_few_the_highest_suffix_goes() -> None:
    found = fleet((0.1, 2), (0.1, 9), (0.1, 2))
    assert decision_of(found, FREENESS).actions == (RemoveWorker("ns_VllmWorker_3", "aggregated"),)


def test_in_the_range_nothing_is_done() -> None:
    decision = decision_of(fleet((0.5, 64)), FREENESS)
    assert decision.actions == ()
    assert reason_of(decision, "aggregated") == "freeness 256 is between 50 and 500"


def test_prefill_workers_go_by_the_queue_whatever_the_policy() -> None:
    found = pull(worker(kv=0.5, running=64), prefiller(busy=True), queue=3)
    assert decision_of(found, FREENESS).actions == (AddWorker("prefill", "PrefillWorker"),)


def past(*in_flight: int, workers: int = 1) -> tuple[Window, ...]:
    """Intervals of 30 s, each with so many requests at each worker."""
    return tuple(
        aggregate(
            [fleet(*[(0.3, running)] * workers, at=at * 30.0), fleet(*[(0.3, running)] * workers, at=at * 30 + 29)]
        )
        for at, running in enumerate(in_flight)
    )


def concurrency(*in_flight: int, workers: int = 1) -> tuple[object, ...]:
    """Return the actions at the end of the last of these intervals."""
    *_, now = range(len(in_flight))
    found = [fleet(*[(0.3, in_flight[-1])] * workers, at=now * 30.0 + second) for second in (0, 29)]
    return decision_of(found, CONCURRENCY, past(*in_flight[:-1], workers=workers)).actions


def test_as_many_workers_as_the_requests_need() -> None:
    assert concurrency(16) == ()
    assert concurrency(17) == ADD


def test_the_highest_demand_of_the_window_counts() -> None:
    assert concurrency(17, 3) == ADD
    assert concurrency(17, 3, 3, 3, 3) == ()


def test_workers_go_when_the_demand_has_been_low_for_the_whole_window() -> None:
    assert concurrency(2, 2, workers=2) == ()
    assert concurrency(2, 2, 2, workers=2) == (RemoveWorker("ns_VllmWorker_2", "aggregated"),)


def test_for_prefill_workers_jobs_waiting_and_in_hand_count() -> None:
    found = pull(worker(), prefiller(busy=True), queue=QueueLength(1, 4))
    assert decision_of(found, CONCURRENCY).actions == (AddWorker("prefill", "PrefillWorker"),)
