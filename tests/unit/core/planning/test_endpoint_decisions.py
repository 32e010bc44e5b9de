"""Decisions about endpoints: what each policy wants, and what there is room for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.endpoints import EndpointState
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import ScaleEndpoint
from dynamo_local.core.planning.decide import LEFT_ALONE, Memories, decide
from dynamo_local.core.planning.memory import Memory
from dynamo_local.core.planning.options import PlannerOptions
from tests.unit.core.planning.endpoint_fleets import LivingEndpoints, decided, order_of, pull, seen, spec, workers

WIDE = PlannerOptions(max_gpu_budget=64)


def test_the_wanted_number_is_ordered_at_the_first_pull() -> None:
    decision = decided(pull(seen(spec(), in_flight=100)))["chat"]
    assert decision.order == ScaleEndpoint("chat", 7)
    assert decision.text == (
        "chat: 7 workers instead of 1 (wants 7: at most 100 requests in flight in 600 s, 16 per worker)"
    )


def test_a_planner_that_observes_says_what_it_would_order() -> None:
    decision = decided(pull(seen(spec(), in_flight=100)), PlannerOptions(no_operation=True))["chat"]
    assert (decision.acts, decision.change) == (False, "chat: would have 7 workers instead of 1")


def test_numbers_stay_within_the_bounds() -> None:
    most = decided(pull(seen(spec(max_workers=3), in_flight=100)))["chat"]
    assert most.order == ScaleEndpoint("chat", 3)
    assert "7 needed, the maximum is 3" in most.reasons
    assert decided(pull(seen(spec(min_workers=2), in_flight=0)))["chat"].order is None


def test_workers_go_when_the_demand_has_been_low_for_the_whole_window() -> None:
    server = LivingEndpoints([spec()], demands={"chat": 100})
    server.pull()
    assert server.running["chat"] == 7
    server.demands["chat"] = 20
    for _ in range(599):
        server.pull()
    assert server.running["chat"] == 7
    for _ in range(2):
        server.pull()
    assert server.running["chat"] == 2


def test_a_planner_that_has_just_started_removes_nobody() -> None:
    decision = decided(pull(seen(spec(), workers("chat", 5), in_flight=1)))["chat"]
    assert decision.order is None
    assert "watched for 0 s only" in decision.reasons


def test_what_cannot_be_read_changes_nothing() -> None:
    server = LivingEndpoints([spec()], demands={"chat": 100})
    server.pull()
    server.demands["chat"] = None
    for _ in range(700):
        decision = server.pull()["chat"]
    assert server.running["chat"] == 7
    assert "the number of requests in flight cannot be read" in decision.reasons
    server.demands["chat"] = 0
    server.pull()
    assert server.running["chat"] == 7, "nobody knows what came in those minutes"


def test_an_unreadable_statefile_changes_nothing() -> None:
    busy = seen(spec(), in_flight=100)
    unread = replace(busy, fleet=replace(busy.fleet, workers=None))
    for observation in (pull(busy, own=None), pull(unread)):
        decision = decided(observation)["chat"]
        assert (decision.order, decision.reasons) == (None, "hold: statefile or bus cannot be read")


def test_prefill_workers_go_by_the_jobs_of_their_queue() -> None:
    disagg = spec(disaggregated=True, max_prefill_workers=4)
    running = (*workers("chat", 1, "decode"), *workers("chat", 1, "prefill"))
    busy = seen(disagg, running, in_flight=40, queue=QueueLength(6, 3), wanted_prefill=1)
    decision = decided(pull(busy))["chat"]
    assert decision.order == ScaleEndpoint("chat", 3, 3)
    unread = replace(busy, fleet=replace(busy.fleet, queue=None))
    decision = decided(pull(unread))["chat"]
    assert decision.order == ScaleEndpoint("chat", 3, None)
    assert "the prefill queue cannot be read" in decision.reasons


def test_load_proposes_one_worker_at_the_end_of_each_interval() -> None:
    server = LivingEndpoints([spec(policy="load", max_workers=4)], PlannerOptions(adjustment_interval=5))
    full = workers("chat", 1, kv=0.95)
    memories: Memories = {}
    numbers = []
    for at in range(14):
        planned = decide(pull(seen(spec(policy="load"), full), at=float(at)), memories, server.options)
        memories = planned.memories
        numbers.append(order_of(planned))
    assert numbers == [1] * 5 + [2] * 9


def test_load_waits_for_a_worker_that_starts() -> None:
    running = (*workers("chat", 1, kv=0.95), *workers("chat", 2, standing="starting", kv=None)[1:])
    options = PlannerOptions(adjustment_interval=5)
    memories: Memories = {}
    for at in range(7):
        planned = decide(pull(seen(spec(policy="load"), running), at=float(at)), memories, options)
        memories = planned.memories
    assert planned.decisions[0].order is None
    assert "but chat@1_VllmWorker_2 is starting" in planned.decisions[0].reasons


def test_a_number_ordered_by_somebody_else_ends_a_proposal() -> None:
    options = PlannerOptions(adjustment_interval=5)
    memories: Memories = {}
    for at in range(6):
        planned = decide(pull(seen(spec(policy="load"), workers("chat", 1, kv=0.95)), at=float(at)), memories, options)
        memories = planned.memories
    assert planned.decisions[0].order == ScaleEndpoint("chat", 2)
    by_hand = pull(seen(spec(policy="load"), workers("chat", 5, kv=0.95)), at=6.5)
    assert decide(by_hand, memories, options).decisions[0].order is None


def test_endpoints_that_the_server_changes_are_left_alone_and_their_devices_are_taken() -> None:
    for state in sorted(LEFT_ALONE):
        code = seen(spec("code"), workers("code", 3), in_flight=500, state=state)
        chat = seen(spec(), in_flight=500, created_at=1.0)
        found = decided(pull(code, chat))
        assert list(found) == ["chat"]
        assert found["chat"].order == ScaleEndpoint("chat", 5)
        assert "3 are code's" in found["chat"].reasons


def test_a_fixed_number_needs_no_decision() -> None:
    assert decided(pull(seen(spec(max_workers=None), in_flight=500))) == {}
    assert decided(pull(seen(spec(adapter_of="base"), (), in_flight=500))) == {}


def test_reasons_name_who_has_the_rest_of_the_budget() -> None:
    chat = seen(spec(max_workers=12), in_flight=190)
    code = seen(spec("code", min_workers=2), in_flight=0, created_at=1.0)
    decision = decided(pull(chat, code, own=1))["chat"]
    assert decision.order == ScaleEndpoint("chat", 5)
    assert decision.reasons == (
        "wants 12: at most 190 requests in flight in 600 s, 16 per worker; "
        "gets 5: of 8 devices 1 is the graph's own, 2 are code's minimum"
    )


def test_the_example_of_the_guide() -> None:
    halves = tuple(replace(worker, devices=0.5) for worker in workers("embed", 2))
    chat = seen(spec(min_workers=2), in_flight=120)
    code = seen(spec("code", max_workers=4), in_flight=60, created_at=1.0)
    embed = seen(spec("embed", gpu=0.5, min_workers=2, max_workers=2), halves, created_at=2.0)
    found = decided(pull(chat, code, embed))
    assert (found["chat"].order, found["code"].order) == (ScaleEndpoint("chat", 5), ScaleEndpoint("code", 2))
    assert found["chat"].reasons == (
        "wants 8: at most 120 requests in flight in 600 s, 16 per worker; "
        "gets 5: of 8 devices 2 are code's, 1 is embed's"
    )


def test_who_has_more_than_its_share_gives_back_before_others_get() -> None:
    server = LivingEndpoints([spec(), spec("code")], demands={"chat": 200})
    server.pull()
    assert server.running == {"chat": 7, "code": 1}
    server.demands["code"] = 200
    decisions = server.pull()
    assert decisions["chat"].order == ScaleEndpoint("chat", 4)
    assert decisions["code"].order is None
    assert "gets 4: of 8 devices 4 are chat's; 1 now, 3 more when devices are given back" in decisions["code"].reasons
    server.pull()
    assert server.running == {"chat": 4, "code": 4}


def test_an_answered_order_is_not_repeated_while_the_board_is_old() -> None:
    busy = pull(seen(spec(), in_flight=100))
    planned = decide(busy, {}, PlannerOptions())
    answered = {"chat": planned.memories["chat"].answered(busy.board, 7, 0)}
    again = decide(busy, answered, PlannerOptions())
    assert again.decisions[0].order is None
    newer = replace(busy, board=busy.board + 1)
    assert decide(newer, answered, PlannerOptions()).decisions[0].order == ScaleEndpoint("chat", 7)


def test_a_refused_order_is_not_repeated_at_once() -> None:
    busy = seen(spec(), in_flight=100)
    refused = {"chat": Memory().refused(until=30.0)}
    assert decide(pull(busy, at=29.0), refused, PlannerOptions()).decisions == ()
    assert decide(pull(busy, at=30.0), refused, PlannerOptions()).decisions[0].order == ScaleEndpoint("chat", 7)


def test_workers_without_devices_count_as_one_and_shares_as_shares() -> None:
    halves = spec("embed", gpu=0.5, max_workers=16)
    half = tuple(replace(worker, devices=0.5) for worker in workers("embed", 1))
    found = decided(pull(seen(halves, half, in_flight=500)))
    assert found["embed"].order == ScaleEndpoint("embed", 16)
    mockers = tuple(replace(worker, devices=0) for worker in workers("chat", 1))
    assert decided(pull(seen(spec(), mockers, in_flight=500), inventory=3))["chat"].order == ScaleEndpoint("chat", 3)


demands = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.none() | st.integers(0, 200), max_size=3)
states = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(("ready", "updating", "failed")), max_size=1)


@given(st.lists(st.tuples(demands, states), min_size=1, max_size=12), st.integers(3, 12))
def test_the_budget_is_kept_and_bounds_hold_whatever_is_asked(
    steps: list[tuple[dict[str, int | None], dict[str, EndpointState]]], devices: int
) -> None:
    options = PlannerOptions(max_gpu_budget=devices, endpoint_concurrency_window=3)
    server = LivingEndpoints([spec("a"), spec("b", max_workers=4), spec("c", max_workers=2)], options, inventory=16)
    for demand, state in steps:
        server.demands, server.states = demand, state
        server.pull()
        assert sum(server.running.values()) <= devices
        assert all(1 <= server.running[each.name] <= each.most_workers for each in server.specs)


@given(demands, st.permutations([0, 1, 2]))
def test_the_order_of_endpoints_does_not_matter(demand: dict[str, int | None], order: list[int]) -> None:
    some = [
        seen(spec(name), in_flight=demand.get(name, 0), created_at=float(age))
        for age, name in enumerate(("a", "b", "c"))
    ]
    assert decided(pull(*some)) == decided(pull(*(some[index] for index in order)))


@given(
    state=st.sampled_from(("parked", "asleep", "waking", "waiting", "starting", "ready")),
    least=st.integers(0, 1),
    held=st.integers(0, 3),
    in_flight=st.none() | st.integers(0, 200),
    others=st.integers(0, 200),
)
def test_whether_there_is_any_worker_is_never_the_planners_to_decide(
    state: EndpointState, least: int, held: int, in_flight: int | None, others: int
) -> None:
    zero = seen(spec("zero", min_workers=least), workers("zero", held), in_flight=in_flight, state=state)
    other = seen(spec("chat"), in_flight=others, created_at=1.0)
    decisions = decided(pull(zero, other))
    order = decisions["zero"].order if "zero" in decisions else None
    if state in ("parked", "asleep") or (state == "waiting" and least == 0):
        assert order is None
        assert f"left alone: it is {state}" in decisions["zero"].reasons
        chat = decisions["chat"].order
        assert chat is None or (chat.workers or 0) <= 8 - held, "it takes the devices that it holds"
    elif order is not None:
        assert order.workers is not None
        assert order.workers >= (max(held, 1) if state == "waking" and held <= 8 else 1)


@given(in_flight=st.integers(0, 300), queued=st.integers(0, 10_000), per_worker=st.integers(1, 32))
def test_an_endpoint_that_wakes_gets_the_workers_that_its_queue_needs_at_once(
    in_flight: int, queued: int, per_worker: int
) -> None:
    chat = seen(
        spec(min_workers=0, max_workers=40, requests_per_worker=per_worker),
        workers("chat", 1),
        in_flight=in_flight,
        queued=queued,
        state="waking",
    )
    order = decided(pull(chat, inventory=64), WIDE)["chat"].order
    needed = min(40, max(1, -(-(in_flight + queued) // per_worker)))
    assert order == (None if needed == 1 else ScaleEndpoint("chat", needed))


def test_the_highest_queue_of_ten_minutes_counts() -> None:
    server = LivingEndpoints([spec()], demands={"chat": 0}, queued={"chat": 100})
    server.pull()
    assert server.running["chat"] == 7
    server.queued["chat"] = 0
    for _ in range(600):
        server.pull()
    assert server.running["chat"] == 7
    server.pull()
    assert server.running["chat"] == 1


def test_any_policy_can_scale_an_endpoint() -> None:
    """Policy `dynamo` grows by one worker an interval, and keeps a new decode worker for three."""
    options = PlannerOptions(adjustment_interval=5)
    server = LivingEndpoints([spec(policy="dynamo", max_workers=2)], options, kv=0.95)
    ordered = []
    for _ in range(36):
        server.pull()
        ordered.append(server.running["chat"])
        if server.running["chat"] == 2:
            server.kv = 0.1
    # An interval begins with the pull after the end of the last one. The second one began with another number.
    assert ordered == [1] * 5 + [2] * 24 + [1] * 7
