"""The graph's own workers, which come and go one at a time, and those of other endpoints share one budget."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.names import MAIN
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker, RemoveWorker, ScaleEndpoint
from dynamo_local.core.planning.decide import Planned, decide
from dynamo_local.core.planning.memory import Memory
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.steps import held_after
from dynamo_local.core.planning.window import EndpointSeen, Fleet, Observation, aggregate, main_of
from tests.unit.core.planning.endpoint_fleets import order_of, seen, spec, workers
from tests.unit.core.planning.fleets import decision_of, prefiller, pull, reason_of, worker

ADD = AddWorker("decode", "VllmWorker")
OPTIONS = PlannerOptions(adjustment_interval=10)
BUSY = pull(worker(kv=0.95), prefiller(busy=True))
CALM = pull(worker(kv=0.7), prefiller(busy=True))


def test_devices_of_endpoints_count_as_taken() -> None:
    options = PlannerOptions(max_gpu_budget=4)
    assert decision_of(BUSY, options, taken=1).actions == (ADD,)
    full = decision_of(BUSY, options, taken=1.5)
    assert (full.actions, full.devices) == ((), 3.5)
    assert "the budget has 0.5 devices left, 1 needed" in reason_of(full, "decode")


def test_what_an_added_worker_takes_is_promised_before_it_starts() -> None:
    options = PlannerOptions()
    window = aggregate([pull(worker(kv=0.95, devices=2), prefiller())])
    assert held_after(window, (), options) == 3
    assert held_after(window, (AddWorker("decode"),), options) == 5
    assert held_after(window, (RemoveWorker("ns_VllmWorker", "decode"),), options) == 3


def at_the_end(main: Fleet, *others: EndpointSeen, options: PlannerOptions = OPTIONS) -> Planned:
    """Decide at the end of an interval in which the graph's own workers were as now."""
    memory = Memory(pulls=(main,))
    moved = [replace(each, fleet=replace(each.fleet, at=10.0)) for each in others]
    fleets = [replace(main, at=10.0), *(each.fleet for each in moved)]
    held = sum(fleet.devices or 0 for fleet in fleets)
    observation = Observation(10.0, (main_of(fleets[0]), *moved), held, 8)
    return decide(observation, {MAIN: memory}, options)


def test_what_endpoints_were_ordered_is_taken_before_it_starts() -> None:
    ordered = seen(spec(), workers("chat", 1), wanted=6, in_flight=96)
    main, chat = at_the_end(BUSY, ordered).decisions
    assert (main.actions, main.devices) == ((), 8)
    assert "the budget has 0 devices left, 1 needed" in reason_of(main, "decode")
    assert chat.order is None


def test_endpoints_get_what_an_action_leaves_until_it_is_over() -> None:
    busy = seen(spec(), workers("chat", 1), in_flight=500)
    planned = at_the_end(BUSY, busy)
    main, chat = planned.decisions
    assert (main.actions, chat.order) == ((ADD,), ScaleEndpoint("chat", 5))
    assert "of 8 devices 3 are the graph's own" in chat.reasons
    again = replace(busy, fleet=replace(busy.fleet, at=11.0))
    observation = Observation(11.0, (main_of(replace(CALM, at=11.0)), again), 3, 8)
    meanwhile = decide(observation, planned.memories, OPTIONS)
    assert order_of(meanwhile) == 5
    undone = planned.memories[MAIN].acted([ActionOutcome(ADD, False, None, "no", 1.0)])
    after = decide(observation, {**planned.memories, MAIN: undone}, OPTIONS)
    assert order_of(after) == 6
    assert undone.history[-1].failed == {"decode"}


def test_a_planner_that_observes_has_no_action_under_way() -> None:
    planned = at_the_end(BUSY, options=replace(OPTIONS, no_operation=True))
    assert planned.decisions[0].actions == (ADD,)
    assert planned.memories[MAIN].under_way is None


@given(
    kv=st.floats(0, 1),
    decoding=st.integers(1, 4),
    running=st.integers(1, 4),
    in_flight=st.none() | st.integers(0, 300),
    devices=st.integers(1, 12),
)
def test_all_changes_together_fit_the_budget(
    kv: float, decoding: int, running: int, in_flight: int | None, devices: int
) -> None:
    main = pull(*(worker(f"VllmWorker_{number}", kv=kv) for number in range(1, decoding + 1)), prefiller())
    chat = seen(spec(), workers("chat", running), in_flight=in_flight)
    held = decoding + 1 + running
    planned = at_the_end(main, chat, options=replace(OPTIONS, max_gpu_budget=devices))
    (stepped, *rest) = planned.decisions
    added = sum(isinstance(action, AddWorker) for action in stepped.actions)
    grown = sum((decision.order.workers or 0) - running for decision in rest if decision.order is not None)
    assert (added == 0 and grown <= 0) or held + added + max(grown, 0) <= min(devices, 8)
