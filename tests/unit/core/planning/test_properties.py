"""Properties of every policy, for arbitrary observations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet.rates import Reading
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import AddWorker, RemoveWorker, SwitchRole, roles_of
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import POLICIES
from dynamo_local.core.planning.steps import step
from dynamo_local.core.planning.window import Fleet, WorkerSeen, aggregate
from tests.unit.core.planning.fleets import AGGREGATED, DISAGGREGATED, KV_TOKENS, LivingFleet

Name = Literal["load", "freeness", "concurrency"]
NAMES: tuple[Name, ...] = ("load", "freeness", "concurrency")
policies = st.sampled_from(NAMES)
readings = st.builds(
    Reading,
    running=st.integers(0, 64),
    waiting=st.integers(0, 3),
    kv_usage=st.floats(0, 1),
    age_s=st.floats(0, 5),
    head_tokens=st.none() | st.integers(0, 4000),
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[WorkerSeen, ...]:
    """The workers of one pull, with one to four devices each."""
    disaggregated = draw(st.booleans())
    roles = sorted(DISAGGREGATED if disaggregated else AGGREGATED)
    gpus = draw(st.integers(1, 4))
    return tuple(
        WorkerSeen(
            watcher=f"ns_VllmWorker_{index}",
            role=draw(st.sampled_from(roles)),
            standing=draw(st.sampled_from(["routable", "routable", "routable", "starting", "parked", "retiring"])),
            devices=gpus,
            reading=draw(st.none() | readings),
            kv_tokens=KV_TOKENS,
        )
        for index in range(1, draw(st.integers(0, 7)) + 1)
    )


@st.composite
def intervals(draw: st.DrawFn, workers: tuple[WorkerSeen, ...]) -> list[Fleet]:
    """Some pulls of the same workers, with other readings in each."""
    aggregated = any(worker.role == "aggregated" for worker in workers)
    pulls = []
    for at in range(draw(st.integers(1, 3))):
        seen = tuple(replace(worker, reading=draw(st.none() | readings)) for worker in workers)
        queue = draw(st.none() | st.builds(QueueLength, st.integers(0, 20), st.integers(0, 4)))
        templates = AGGREGATED if aggregated else DISAGGREGATED
        pulls.append(Fleet(float(at), seen, queue, templates))
    return pulls


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[list[Fleet]], PlannerOptions]:
    """Up to five intervals, the last of which is to be decided on."""
    workers = draw(fleets())
    found = [draw(intervals(workers)) for _ in range(draw(st.integers(1, 5)))]
    most = draw(st.integers(1, 12))
    gpus = draw(st.integers(1, most))
    options = PlannerOptions(
        max_gpu_budget=most,
        min_gpu_budget=draw(st.integers(1, most)),
        min_endpoint=draw(st.integers(1, 3)),
        decode_engine_num_gpu=gpus,
        prefill_engine_num_gpu=gpus,
        policy=draw(policies),
    )
    return found, options


def test_these_are_all_policies() -> None:
    """Policy `dynamo` has rules of its own (test_dynamo_policy.py)."""
    assert {*NAMES, "dynamo"} == set(POLICIES)


def decided(found: list[list[Fleet]], options: PlannerOptions, most: int | None = None) -> Decision:
    *before, last = [aggregate(pulls) for pulls in found]
    return step(last, tuple(before), options, options.max_gpu_budget if most is None else most)


@given(situations(), st.integers(0, 16))
def test_the_budget_is_never_exceeded(situation: tuple[list[list[Fleet]], PlannerOptions], inventory: int) -> None:
    found, options = situation
    limit = min(options.max_gpu_budget, inventory)
    decision = decided(found, options, limit)
    last = found[-1][-1]
    assert last.workers is not None
    held = sum(worker.devices for worker in last.workers)
    # As many as the role's workers have; of one that has none, as many as is said.
    cost = {
        role: max([options.decode_engine_num_gpu, *(one.devices for one in last.workers if one.role == role)])
        for role in {*DISAGGREGATED, *AGGREGATED}
    }
    added = sum(cost[action.role] for action in decision.actions if isinstance(action, AddWorker))
    # What leaves gives its devices back later, if ever: it does not count.
    assert added == 0 or held + added <= limit


@given(situations())
def test_each_role_changes_by_one_at_most(situation: tuple[list[list[Fleet]], PlannerOptions]) -> None:
    changed = [role for action in decided(*situation).actions for role in roles_of(action)]
    assert len(changed) == len(set(changed))


@given(situations())
def test_no_role_falls_below_its_minimum(situation: tuple[list[list[Fleet]], PlannerOptions]) -> None:
    found, options = situation
    last = found[-1][-1].workers or ()
    for action in decided(found, options).actions:
        if isinstance(action, RemoveWorker | SwitchRole):
            stay = [one for one in last if one.role == action.role and one.standing != "retiring"]
            assert action.watcher in {one.watcher for one in stay if one.standing == "routable"}
            assert sum(one.devices for one in stay if one.watcher != action.watcher) >= options.min_gpu_budget
            assert len(stay) > options.min_endpoint


@given(situations(), st.randoms())
def test_the_order_of_the_workers_does_not_matter(
    situation: tuple[list[list[Fleet]], PlannerOptions], random: Any
) -> None:
    found, options = situation

    def shuffled(pull: Fleet) -> Fleet:
        workers = list(pull.workers or ())
        random.shuffle(workers)
        return replace(pull, workers=tuple(workers))

    again = [[shuffled(pull) for pull in pulls] for pulls in found]
    assert decided(again, options) == decided(found, options)


@given(situations())
def test_deciding_again_decides_the_same(situation: tuple[list[list[Fleet]], PlannerOptions]) -> None:
    assert decided(*situation) == decided(*situation)


@given(situations(), policies)
def test_what_is_unknown_holds(situation: tuple[list[list[Fleet]], PlannerOptions], policy: Name) -> None:
    """Without readings nothing is changed by them; a role without workers still gets its minimum."""
    found, options = situation
    blind = [
        [
            replace(pull, queue=None, workers=tuple(replace(one, reading=None) for one in pull.workers or ()))
            for pull in pulls
        ]
        for pulls in found
    ]
    actions = decided(blind, replace(options, policy=policy)).actions
    assert all(isinstance(action, AddWorker) for action in actions)
    for action in actions:
        staying = [one for one in blind[-1][-1].of_role(action.role) if one.standing != "retiring"]
        assert sum(one.devices for one in staying) < options.min_gpu_budget or len(staying) < options.min_endpoint


@given(situations())
def test_a_fleet_that_cannot_be_read_is_left_alone(situation: tuple[list[list[Fleet]], PlannerOptions]) -> None:
    found, options = situation
    last = replace(found[-1][-1], workers=None)
    decision = decided([*found[:-1], [*found[-1], last]], options)
    assert decision.actions == ()
    assert decision.devices is None


work = st.floats(0.05, 5.0)


@given(policies, work, work, st.integers(2, 9))
def test_a_constant_load_is_answered_once(policy: Name, decode: float, prefill: float, budget: int) -> None:
    """The fleet settles, and reverses its direction only because of a backlog."""
    fleet = LivingFleet(PlannerOptions(policy=policy, max_gpu_budget=budget, concurrency_window=90.0), decode, prefill)
    totals = [fleet.total]
    for _ in range(60):
        fleet.interval()
        totals.append(fleet.total)
        assert fleet.total <= budget
        assert min(fleet.count("decode"), fleet.count("prefill")) >= 1
    assert not any(decision.actions for decision in fleet.decisions[-15:]), [d.text for d in fleet.decisions[-6:]]
