"""Policy `dynamo` against the rules of Dynamo's local planner, stated anew here and independently of the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import assume, given
from hypothesis import strategies as st

from dynamo_local.core.planning.actions import AddWorker, RemoveWorker
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.steps import step
from dynamo_local.core.planning.window import Fleet, History, Window, WorkerSeen, aggregate
from tests.unit.core.planning.fleets import prefiller, pull, reason_of, worker

OPTIONS = PlannerOptions(policy="dynamo", prefill_queue_scale_up_threshold=5.0)

queues = st.lists(st.integers(0, 12), min_size=1, max_size=5)
loads = st.floats(0, 1)


@dataclass(frozen=True)
class Interval:
    """An interval: the length of the queue at each pull, and the KV usage and waiting requests of each decode worker,
    constant over the interval."""

    queue: Sequence[int]
    decode: Sequence[tuple[float, int]]
    prefill: int

    @property
    def workers(self) -> list[WorkerSeen]:
        decoding = [worker(_name("VllmWorker", i), kv=kv, waiting=n) for i, (kv, n) in enumerate(self.decode)]
        return [*decoding, *(prefiller(_name("PrefillWorker", i)) for i in range(self.prefill))]

    @property
    def window(self) -> Window:
        return aggregate([pull(*self.workers, at=float(at), queue=length) for at, length in enumerate(self.queue)])


def _name(service: str, index: int) -> str:
    return f"{service}_{index}" if index else service


intervals = st.builds(
    Interval,
    queue=queues,
    decode=st.lists(st.tuples(loads, st.integers(0, 5)), min_size=1, max_size=4),
    prefill=st.integers(1, 4),
)
options = st.builds(
    replace,
    st.just(OPTIONS),
    max_gpu_budget=st.integers(1, 10),
    min_endpoint=st.integers(1, 3),
    decode_kv_scale_up_threshold=st.floats(0.5, 1.0),
    decode_kv_scale_down_threshold=st.floats(0.0, 0.4),
    prefill_queue_scale_up_threshold=st.floats(1.0, 8.0),
    prefill_queue_scale_down_threshold=st.floats(0.0, 0.9),
)
graces = st.lists(st.booleans(), max_size=6)
"""For each earlier interval: whether the planner added a decode worker at its end."""


def expected(interval: Interval, limits: PlannerOptions, added: Sequence[bool]) -> list[tuple[str, str]]:
    """Return the changes that Dynamo's rules ask for, in order: (`add` or `remove`, role)."""
    queue = math.fsum(interval.queue) / len(interval.queue)
    kv = math.fsum(usage + 0.02 * waiting for usage, waiting in interval.decode) / len(interval.decode)
    for threshold in (limits.decode_kv_scale_up_threshold, limits.decode_kv_scale_down_threshold):
        assume(abs(kv - threshold) > 1e-9)  # sums in another order round in another way
    changes = []
    gpus = len(interval.decode) + interval.prefill
    if queue < limits.prefill_queue_scale_down_threshold and interval.prefill > limits.min_endpoint:
        changes.append(("remove", "prefill"))
        gpus -= 1
    if (
        kv < limits.decode_kv_scale_down_threshold
        and len(interval.decode) > limits.min_endpoint
        and not any(added[-3:])
    ):
        changes.append(("remove", "decode"))
        gpus -= 1
    trend = interval.queue[-1] + 3 * (interval.queue[-1] - interval.queue[0])
    up = limits.prefill_queue_scale_up_threshold
    if queue > up and trend > up and gpus < limits.max_gpu_budget:
        changes.append(("add", "prefill"))
        gpus += 1
    if kv > limits.decode_kv_scale_up_threshold and gpus < limits.max_gpu_budget:
        changes.append(("add", "decode"))
    return changes


def history_of(interval: Interval, added: Sequence[bool]) -> History:
    return tuple(replace(interval.window, added=frozenset({"decode"} if came else ())) for came in added)


def decided(interval: Interval, limits: PlannerOptions = OPTIONS, added: Sequence[bool] = ()) -> Decision:
    window = interval.window
    return step(window, history_of(interval, added), limits, limits.max_gpu_budget)


def changes_of(decision: Decision) -> list[tuple[str, str]]:
    kinds = {AddWorker: "add", RemoveWorker: "remove"}
    return [(kinds[type(action)], action.role) for action in decision.actions if not hasattr(action, "to")]


@given(intervals, options, graces)
def test_the_changes_are_those_of_the_rules(interval: Interval, limits: PlannerOptions, added: list[bool]) -> None:
    decision = decided(interval, limits, added)
    assert changes_of(decision) == expected(interval, limits, added)
    assert len(decision.actions) == len(changes_of(decision)), "no worker switches its role"


@given(intervals, options)
def test_each_role_changes_by_one_worker_at_most(interval: Interval, limits: PlannerOptions) -> None:
    roles = [role for _, role in changes_of(decided(interval, limits))]
    assert len(roles) == len(set(roles))


@given(intervals, options, st.data())
def test_nothing_changes_after_an_interval_in_which_a_worker_came_or_went(
    interval: Interval, limits: PlannerOptions, data: st.DataObject
) -> None:
    other = replace(interval, prefill=data.draw(st.integers(1, 4).filter(lambda number: number != interval.prefill)))
    pulls = [pull(*one.workers, at=float(at), queue=9) for at, one in enumerate((other, interval))]
    window = aggregate(pulls)
    decision = step(window, (), limits, limits.max_gpu_budget)
    assert decision.actions == ()
    assert "at the interval's start" in reason_of(decision, "prefill")


def test_a_waiting_request_counts_for_a_fiftieth_of_the_kv_cache() -> None:
    busy = Interval([0], [(0.85, 3)], 1)
    assert changes_of(decided(busy)) == [("add", "decode")]
    assert changes_of(decided(replace(busy, decode=[(0.85, 2)]))) == []


def test_the_highest_suffix_goes() -> None:
    decision = decided(Interval([1], [(0.1, 0)] * 3, 1))
    assert decision.actions == (RemoveWorker("ns_VllmWorker_2", "decode"),)


def test_what_a_removal_frees_may_be_taken_at_once() -> None:
    full = replace(OPTIONS, max_gpu_budget=4)
    assert changes_of(decided(Interval([0], [(0.95, 0)] * 2, 2), full)) == [("remove", "prefill"), ("add", "decode")]


def test_a_decode_worker_may_go_in_the_fourth_interval_after_one_came() -> None:
    idle = Interval([1], [(0.1, 0)] * 2, 1)
    assert changes_of(decided(idle, added=[True, False, False])) == []
    assert changes_of(decided(idle, added=[True, False, False, False])) == [("remove", "decode")]


def test_a_constant_load_between_the_thresholds_goes_up_and_down_as_with_dynamo() -> None:
    """Policy `load` would keep the second worker: the first one would have 0.9 of its KV cache."""
    two = Interval([1], [(0.45, 0)] * 2, 1)
    assert changes_of(decided(two)) == [("remove", "decode")]
    assert changes_of(decided(two, replace(OPTIONS, policy="load"), [False] * 4)) == []


def test_no_worker_goes_while_the_load_of_one_is_unknown() -> None:
    window = aggregate([pull(worker(kv=0.1), worker("VllmWorker_1", kv=None), prefiller(), queue=1)])
    assert step(window, (), OPTIONS, 8).actions == ()


def test_a_role_below_its_minimum_gets_no_worker() -> None:
    wants = replace(OPTIONS, min_endpoint=3)
    assert changes_of(decided(Interval([1], [(0.7, 0)], 1), wants)) == []


def test_unknown_numbers_change_nothing() -> None:
    window = aggregate([pull(worker(kv=None), worker("VllmWorker_1", kv=None), prefiller(), queue=None)])
    assert step(window, (), OPTIONS, 8).actions == ()
    blind = aggregate([Fleet(0.0, None, None, {"decode": "VllmWorker"}), pull(worker(kv=0.99), prefiller())])
    assert step(blind, (), OPTIONS, 8).actions == ()
