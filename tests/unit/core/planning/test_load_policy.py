"""Policy `load`, rule by rule, as Dynamo's documentation states them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import AddWorker, RemoveWorker, SwitchRole
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import aggregate
from tests.unit.core.planning.fleets import AGGREGATED, decision_of, prefiller, pull, reason_of, worker

ADD_DECODE = (AddWorker("decode", "VllmWorker"),)
ADD_PREFILL = (AddWorker("prefill", "PrefillWorker"),)


@pytest.mark.parametrize(
    ("usages", "actions"),
    [((0.95,), ADD_DECODE), ((0.9,), ()), ((1.0, 0.7), ()), ((1.0, 0.85), ADD_DECODE), ((0.5,), ())],
)
def test_a_decode_worker_is_added_when_mean_kv_usage_is_above_the_threshold(
    usages: tuple[float, ...], actions: tuple[AddWorker, ...]
) -> None:
    workers = [worker(f"VllmWorker_{index}", kv=kv) for index, kv in enumerate(usages, 1)]
    assert decision_of(pull(*workers, prefiller(busy=True))).actions == actions


def test_the_mean_is_of_the_whole_interval() -> None:
    pulls = [pull(worker(kv=kv), prefiller(), at=float(at)) for at, kv in enumerate((1.0, 1.0, 0.6, 0.99))]
    assert decision_of(pulls).actions == ()
    assert decision_of(pulls[:2]).actions == ADD_DECODE


def test_an_aggregated_worker_is_added_likewise() -> None:
    found = pull(worker(role="aggregated", kv=0.95), templates=AGGREGATED, queue=None)
    assert decision_of(found).actions == (AddWorker("aggregated", "VllmWorker"),)


def test_a_worker_at_which_requests_wait_is_full_whatever_its_cache_says() -> None:
    decision = decision_of(pull(worker(kv=0.6, running=64, waiting=20), prefiller()))
    assert decision.actions == ADD_DECODE
    assert "load 1.00 (KV usage 0.60, 20.0 waiting) is above 0.9" in reason_of(decision, "decode")


def test_requests_that_waited_for_a_moment_count_for_that_moment() -> None:
    pulls = [pull(worker(kv=0.6, waiting=int(at == 0)), prefiller(), at=float(at)) for at in range(4)]
    assert decision_of(pulls).actions == ()


def test_a_decode_worker_is_removed_when_kv_usage_is_below_the_threshold_highest_suffix_first() -> None:
    workers = [worker(f"VllmWorker{suffix}", kv=0.1) for suffix in ("", "_2", "_10")]
    assert decision_of(pull(*workers, prefiller())).actions == (RemoveWorker("ns_VllmWorker_10", "decode"),)


def test_none_is_removed_if_the_others_would_be_short_then() -> None:
    decision = decision_of(pull(worker(kv=0.46), worker("VllmWorker_1", kv=0.46), prefiller()))
    assert decision.actions == ()
    assert "the load of the other 1 would be 0.92" in reason_of(decision, "decode")


def test_none_is_removed_for_three_intervals_after_one_came() -> None:
    before = aggregate([pull(worker(kv=0.1), prefiller())])
    found = pull(worker(kv=0.1), worker("VllmWorker_1", kv=0.0), prefiller())
    now = aggregate([found])
    for intervals in (0, 1, 2):
        history = (before, before, before, *([now] * intervals))
        assert decision_of(found, history=history).actions == ()
    assert decision_of(found, history=(before, now, now, now)).actions == (RemoveWorker("ns_VllmWorker_1", "decode"),)


def test_a_planner_that_has_just_started_removes_no_decode_worker() -> None:
    found = pull(worker(kv=0.1), worker("VllmWorker_1", kv=0.0), prefiller())
    decision = decision_of(found, history=())
    assert decision.actions == ()
    assert "less than 3 intervals" in reason_of(decision, "decode")


@pytest.mark.parametrize(("waiting", "actions"), [(0, ()), (1, ()), (2, ADD_PREFILL)])
def test_a_prefill_worker_is_added_when_more_jobs_wait_for_each_than_the_threshold(
    waiting: int, actions: tuple[AddWorker, ...]
) -> None:
    found = pull(worker(), prefiller(busy=True), prefiller("PrefillWorker_1", busy=True), queue=waiting)
    assert decision_of(found).actions == actions


@pytest.mark.parametrize(("lengths", "added"), [((8, 8), True), ((8, 7), True), ((8, 6), False), ((2, 9), True)])
def test_no_prefill_worker_is_added_if_the_queue_becomes_short_by_itself(lengths: tuple[int, int], added: bool) -> None:
    """Three more such intervals: 8 to 7 leaves 4, 8 to 6 leaves 0."""
    pulls = [pull(worker(), prefiller(busy=True), queue=length) for length in lengths]
    assert decision_of(pulls).actions == (ADD_PREFILL if added else ())


def test_a_prefill_worker_is_removed_when_fewer_jobs_wait_than_the_threshold() -> None:
    found = pull(worker(), prefiller(), prefiller("PrefillWorker_1"), queue=0)
    assert decision_of(found).actions == (RemoveWorker("ns_PrefillWorker_1", "prefill"),)


def test_no_prefill_worker_is_removed_if_the_others_could_not_do_its_work() -> None:
    found = pull(worker(), prefiller(busy=True), prefiller("PrefillWorker_1"), queue=0)
    decision = decision_of(found)
    assert decision.actions == ()
    assert "the other 1 would be busy for 1.00 of the time" in reason_of(decision, "prefill")


def test_jobs_in_hand_do_not_wait() -> None:
    found = pull(worker(), prefiller(busy=True), queue=QueueLength(0, 4))
    assert decision_of(found).actions == ()


def test_a_hung_worker_does_not_keep_the_others_from_getting_help_and_none_is_removed() -> None:
    """The load of a hung worker is stale, hence unknown."""
    full = pull(worker(kv=0.97), worker("VllmWorker_1", kv=None), prefiller())
    assert decision_of(full).actions == ADD_DECODE
    idle = pull(worker(kv=0.0), worker("VllmWorker_1", kv=None), prefiller())
    decision = decision_of(idle)
    assert decision.actions == ()
    assert "no reading from VllmWorker_1" in reason_of(decision, "decode")


def test_without_a_reading_nothing_is_done_and_it_says_so() -> None:
    decision = decision_of(pull(worker(kv=None), prefiller(), queue=None))
    assert decision.actions == ()
    assert reason_of(decision, "decode") == "hold: no reading from VllmWorker"
    assert reason_of(decision, "prefill") == "hold: the prefill queue cannot be read"


# Budget, minimum, role switch


def test_the_budget_counts_what_leaves_and_what_starts() -> None:
    options = PlannerOptions(max_gpu_budget=3)
    leaving = worker("VllmWorker_1", kv=0.0, standing="retiring")
    decision = decision_of(pull(worker(kv=0.95), leaving, prefiller(busy=True)), options)
    assert (decision.actions, decision.devices, decision.max_devices) == ((), 3, 3)
    assert "the budget has 0 devices left, 1 needed" in reason_of(decision, "decode")


def test_the_budget_is_never_more_than_there_is() -> None:
    assert decision_of(pull(worker(kv=0.95), prefiller(busy=True)), inventory=2).actions == ()
    assert decision_of(pull(worker(kv=0.95), prefiller(busy=True)), inventory=3).actions == ADD_DECODE


def test_engines_of_several_devices_need_that_many() -> None:
    options = PlannerOptions(max_gpu_budget=4, decode_engine_num_gpu=2)
    found = pull(worker(kv=0.95, devices=2), prefiller(busy=True))
    assert decision_of(found, options).actions == ()
    assert decision_of(found, PlannerOptions(max_gpu_budget=5, decode_engine_num_gpu=2)).actions == ADD_DECODE


def test_the_last_worker_of_a_role_stays() -> None:
    decision = decision_of(pull(worker(kv=0.0, running=0), prefiller()))
    assert decision.actions == ()
    assert "but the minimum is 1" in reason_of(decision, "decode")


def test_a_role_that_has_lost_all_its_workers_gets_one() -> None:
    assert decision_of(pull(prefiller(busy=True))).actions == ADD_DECODE


def test_while_a_worker_starts_no_other_one_is_added_but_not_for_ever() -> None:
    found = pull(worker(kv=0.95), worker("VllmWorker_1", kv=None, standing="starting"), prefiller(busy=True))
    decision = decision_of(found, history=())
    assert decision.actions == ()
    assert "but VllmWorker_1 is starting" in reason_of(decision, "decode")
    assert decision_of(found).actions == ADD_DECODE


def test_after_a_change_that_failed_the_role_is_left_alone_for_a_while() -> None:
    found = pull(worker(kv=0.95), prefiller(busy=True), queue=9)
    window = aggregate([found])
    failed = replace(window, failed=frozenset({"decode"}))
    assert decision_of(found, history=(window, failed, window, window)).actions == ADD_PREFILL
    assert decision_of(found, history=(failed, window, window, window)).actions == ADD_DECODE + ADD_PREFILL


def test_a_spare_worker_switches_its_role_instead_of_one_stopped_and_one_started() -> None:
    found = pull(worker(kv=0.95), prefiller(), prefiller("PrefillWorker_1"), queue=0)
    assert decision_of(found).actions == (SwitchRole("ns_PrefillWorker_1", "prefill", "decode"),)


def test_a_decode_worker_switches_its_role_when_the_queue_is_long() -> None:
    found = pull(worker(kv=0.1), worker("VllmWorker_1", kv=0.1), prefiller(busy=True), queue=9)
    options = PlannerOptions(max_gpu_budget=3)
    assert decision_of(found, options).actions == (SwitchRole("ns_VllmWorker_1", "decode", "prefill"),)


def test_who_has_none_to_spare_keeps_it_and_one_is_added() -> None:
    assert decision_of(pull(worker(kv=0.95), prefiller(), queue=0)).actions == ADD_DECODE
