"""The rollout of an endpoint's revisions, whatever is ordered, fails and is killed, in whichever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.endpoints.rollout import (
    GIVEN_UP_AFTER,
    End,
    Frontends,
    Launch,
    Ordered,
    Plan,
    Retire,
    Revert,
    Seen,
    Settle,
    Start,
    Workers,
    next_steps,
)
from dynamo_local.core.endpoints.spec import EndpointSpec
from tests.unit.core.endpoints.rollout_world import NAME, World

HAPPENINGS = (
    *("good", "launch", "start", "frontend", "replace"),
    *("scale 0", "scale 1", "scale 3", "kill worker", "kill frontend", "kill server", "request", "request", "answer"),
    *("park", "wake", "ask", "minute", "quarter of an hour"),
    *["time"] * 8,
    *["long time"] * 5,
)


def happen(world: World, what: str) -> None:
    simple: dict[str, Callable[[], None]] = {
        "time": world.pass_time,
        "kill worker": world.kill_worker,
        "kill frontend": world.kill_frontend,
        "kill server": world.kill_server,
        "request": world.request,
        "answer": world.answer,
        "replace": lambda: world.update("good", replaces=True),
        "long time": lambda: spend(world, 8),
        "park": world.park,
        "wake": lambda: world.wake(asked=False),
        "ask": lambda: world.wake(asked=True),
        "minute": lambda: sleep(world, 60),
        "quarter of an hour": lambda: sleep(world, 900),
    }
    if what in simple:
        simple[what]()
    elif what.startswith("scale"):
        world.workers = int(what.split()[1])
    else:
        world.update(what)


def spend(world: World, rounds: int) -> None:
    """Let everything that is under way get on."""
    for _ in range(rounds):
        check_round(world)
        world.pass_time(fair=True)


def sleep(world: World, seconds: float) -> None:
    world.now += seconds


def check_round(world: World) -> None:
    """What holds in every round, whatever happens."""
    before = world.takes
    seen = world.seen()
    had = {number for number, one in seen.items() if one.launched and one.workers.ready and one.frontends.ready}
    ordered = world.ordered
    world.act()
    assert world.free >= 0
    rests = ordered.rest != "awake" or world.ordered.rest != "awake"
    if ordered.workers and not ordered.deleting and not ordered.replace and not rests:
        # Never without a revision that can answer while one can.
        assert before not in had or world.takes in had, "a revision that answered was taken away"
        assert world.takes is not None or ordered.revision not in had
    steps = [step.revision for step in world.plan.steps if hasattr(step, "revision")]
    assert len(steps) == len(set(steps)), "a revision gets two steps at once"
    for step in world.plan.steps:
        assert not isinstance(step, Start) or world.ordered.rest == "awake", "a worker starts for an endpoint at rest"
        if isinstance(step, End) and seen[step.revision].took_requests and not world.drain_is_over:
            one = seen[step.revision]
            assert not one.workers.present or not one.frontends.in_flight, "requests were under way"
            assert world.takes != step.revision
        if isinstance(step, Retire) and step.revision != ordered.revision and not rests:
            assert len(seen[step.revision].workers.ready) > 1, "nobody would answer"


def settle_down(world: World) -> None:
    """Let everything that is under way come to its end, without further mishaps."""
    for _ in range(50):
        check_round(world)
        world.pass_time(fair=True)
        world.answer()


@settings(max_examples=150, deadline=None)
@given(
    first=st.sampled_from(("good", "good", "good", "launch", "start", "frontend")),
    devices=st.integers(1, 4),
    happenings=st.lists(st.sampled_from(HAPPENINGS), max_size=60),
    seed=st.integers(0, 2**32),
    deleted=st.booleans(),
    least=st.integers(0, 1),
    park_after_s=st.sampled_from((None, 30.0)),
)
def test_it_comes_to_what_was_ordered(
    first: str,
    devices: int,
    happenings: list[str],
    seed: int,
    deleted: bool,
    least: int,
    park_after_s: float | None,
) -> None:
    spec = EndpointSpec(name=NAME, model=first, min_workers=least, park_after_s=park_after_s)
    world = World(Random(seed), devices, spec)
    for what in happenings:
        happen(world, what)
        check_round(world)
    if deleted:
        world.delete()
        check_round(world)
        world.drain_is_over = True
        settle_down(world)
        assert world.forgotten
        assert all(one.is_gone for one in world.seen().values())
        return
    settle_down(world)
    check_settled(world)


def check_settled(world: World) -> None:
    entry = world.registry.entry(NAME)
    current = world.revisions[entry.revision]
    if current.is_hopeless or current.failures >= GIVEN_UP_AFTER:
        assert entry.earlier is None, "there is something to go back to"
        if not current.took_requests:
            assert world.takes is None
        assert current.held == 0
        return
    if entry.earlier is not None:
        # The one device that there is has the only worker of the earlier revision.
        assert world.takes == entry.earlier.revision
        assert world.free == 0
        return
    assert set(world.revisions) == {entry.revision}, "a revision is left that nobody ordered"
    assert world.takes == entry.revision
    assert current.starting == []
    match world.idling.rest:
        case "awake":
            assert current.parked == []
            assert len(current.ready) == min(world.workers, world.devices)
            assert world.workers == 0 or current.in_flight == 0
        case "parked":
            assert current.ready == []
        case "asleep":
            assert current.held == 0


def test_a_deleted_endpoint_waits_for_its_requests_no_longer_than_it_must() -> None:
    answering = Seen(
        launched=True, workers=Workers(("w1",)), frontends=Frontends(draining=1, in_flight=2), took_requests=True
    )
    ordered = Ordered(1, deleting=True)
    assert next_steps(ordered, {1: answering}, 1) == Plan((), (1,), None)
    late = Seen(
        launched=True,
        workers=Workers(("w1",)),
        frontends=Frontends(draining=1, in_flight=2),
        took_requests=True,
        drain_is_over=True,
    )
    assert next_steps(ordered, {1: late}, None).steps == (End(1),)


def test_a_frontend_that_is_not_heard_may_still_have_requests_of_the_old_revision() -> None:
    old = Seen(launched=True, workers=Workers(("w1",)), took_requests=True)
    new = Seen(launched=True, workers=Workers(("w2",)), took_requests=True)
    assert next_steps(Ordered(2), {1: old, 2: new}, 2).steps == ()
    heard = Seen(launched=True, workers=Workers(("w2",)), frontends=Frontends(ready=1), took_requests=True)
    assert next_steps(Ordered(2), {1: old, 2: heard}, 2).steps == (End(1),)


@pytest.mark.parametrize(
    "others", [Frontends(ready=1, starting=1), Frontends(ready=1, missing=1), Frontends(starting=2), Frontends()]
)
def test_a_revision_takes_requests_only_when_all_frontends_are_ready(others: Frontends) -> None:
    old = Seen(launched=True, workers=Workers(("w1",)), frontends=Frontends(ready=2), took_requests=True)
    new = Seen(launched=True, workers=Workers(("w2",)), frontends=others)
    assert next_steps(Ordered(2, 1), {1: old, 2: new}, 1).takes == 1
    ready = replace(new, frontends=Frontends(ready=2))
    assert next_steps(Ordered(2, 1), {1: old, 2: ready}, 1).takes == 2


def test_a_frontend_that_never_becomes_ready_is_not_waited_for_for_ever() -> None:
    old = Seen(launched=True, workers=Workers(("w1",)), frontends=Frontends(ready=2), took_requests=True)
    new = Seen(launched=True, workers=Workers(("w2",)), frontends=Frontends(ready=1, missing=1))
    late = replace(new, waits_for_frontends=False)
    assert next_steps(Ordered(2, 1), {1: old, 2: late}, 1).takes == 2
    nobody = replace(late, frontends=Frontends(missing=2))
    assert next_steps(Ordered(2, 1), {1: old, 2: nobody}, 1).takes == 1


@pytest.mark.parametrize("unheard", [Frontends(ready=1, missing=1), Frontends(ready=1, silent=1)])
def test_the_old_revision_ends_when_all_frontends_say_that_they_have_no_request_for_it(unheard: Frontends) -> None:
    old = Seen(launched=True, workers=Workers(("w1",)), took_requests=True)
    new = Seen(launched=True, workers=Workers(("w2",)), frontends=unheard, took_requests=True)
    assert next_steps(Ordered(2), {1: old, 2: new}, 2).steps == ()
    heard = replace(new, frontends=Frontends(ready=2))
    assert next_steps(Ordered(2), {1: old, 2: heard}, 2).steps == (End(1),)


def test_requests_of_the_old_revision_wait_for_its_worker_that_is_started_again() -> None:
    has_requests = Frontends(draining=1, in_flight=2)
    new = Seen(launched=True, workers=Workers(("w2",)), frontends=Frontends(ready=1), took_requests=True)
    for workers, steps in ((Workers(starting=("w1",)), ()), (Workers(dead=("w1",)), (End(1),))):
        old = Seen(launched=True, workers=workers, frontends=has_requests, took_requests=True)
        assert next_steps(Ordered(2), {1: old, 2: new}, 2).steps == steps


@pytest.mark.parametrize("room", [0, 1, 5])
def test_workers_start_side_by_side_as_far_as_there_are_devices(room: int) -> None:
    plan = next_steps(Ordered(1, workers=3, prefill_workers=1), {1: Seen(launched=True, room=room)}, None)
    assert plan.steps == {0: (), 1: (Start(1, 1, 0),), 5: (Start(1, 3, 1),)}[room]


def test_a_dead_worker_is_removed_before_another_starts() -> None:
    dead = Workers(dead=("w1",))
    assert next_steps(Ordered(1), {1: Seen(launched=True, workers=dead, room=1)}, None).steps == (Retire(1, ("w1",)),)


def test_an_update_that_fails_goes_back() -> None:
    old = Seen(launched=True, workers=Workers(("w1",)), frontends=Frontends(ready=1), took_requests=True)
    failed = Seen(is_hopeless=True, error="no such model")
    assert next_steps(Ordered(2, 1), {1: old, 2: failed}, 1) == Plan((Revert("no such model"),), (1,), 1)


def test_an_update_is_settled_as_soon_as_it_answers() -> None:
    both = Seen(launched=True, workers=Workers(("w1",)), frontends=Frontends(ready=1))
    assert next_steps(Ordered(2, 1), {1: both, 2: both}, 1) == Plan((Settle(),), (1, 2), 2)


def test_a_revision_is_launched_first() -> None:
    assert next_steps(Ordered(1), {1: Seen()}, None).steps == (Launch(1),)
    assert next_steps(Ordered(1), {1: Seen(may_start=False)}, None).steps == ()
