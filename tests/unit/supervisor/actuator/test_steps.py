"""The next steps of what was left half done, for any mix of states."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.supervisor.actuator.steps import (
    AwaitStart,
    EndUnclaimed,
    FinishRestarting,
    FinishRetiring,
    ReleaseClaim,
    ReleaseReservation,
    Step,
    next_steps,
    unclaimed,
)
from state.statefile.model import State
from state.statefile.transitions import claim, release, reserve, restart, retire, settle, taken
from tests.unit.state.builders import disaggregated, states

NAMES = [f"dynamo_{name}" for name in ("Frontend", "VllmWorker", "VllmWorker_1", "PrefillWorker_2", "Stray")]
SOME = st.sets(st.sampled_from(NAMES))
MEANT = st.sampled_from([lambda _: True, lambda name: "VllmWorker" in name])


@dataclass
class World:
    """What is observed: the statefile, the watchers that places know, and what is reserved and not claimed."""

    state: State
    statuses: set[str]
    reservations: set[str]

    def __post_init__(self) -> None:
        self.reservations |= {name for name, c in self.state.components.items() if c.phase == "reserved"}

    def take(self, step: Step) -> None:
        """What the step leaves once it was taken."""
        name = step.watcher
        match step:
            case EndUnclaimed() | ReleaseReservation():
                self.statuses.discard(name)
                self.reservations.discard(name)
                if (entry := self.state.components.get(name)) is not None and entry.phase == "reserved":
                    self.state = release(self.state, name)
            case ReleaseClaim() | FinishRetiring():
                self.statuses.discard(name)
                self.reservations.discard(name)
                self.state = release(self.state, name)
            case FinishRestarting() | AwaitStart():
                self.statuses.add(name)
                self.state = settle(self.state, name)


WORLDS = st.builds(World, states(), SOME, SOME)


@given(WORLDS, MEANT)
def test_whatever_is_half_done_has_one_step_and_nothing_else_has_any(world: World, meant: object) -> None:
    assert callable(meant)
    steps = next_steps(world.state, world.statuses, world.reservations, meant)
    entries = {name: c for name, c in world.state.components.items() if c.holds}
    half_done = {name for name, c in entries.items() if c.phase is not None or name not in world.statuses}
    half_done |= (world.statuses | world.reservations) - entries.keys()
    assert sorted(step.watcher for step in steps) == sorted(filter(meant, half_done))


@given(WORLDS)
def test_each_is_the_one_of_the_table(world: World) -> None:
    components = world.state.components
    for step in next_steps(world.state, world.statuses, world.reservations):
        entry = components.get(step.watcher)
        phase = entry.phase if entry is not None else None
        claimed, known = entry is not None and entry.holds, step.watcher in world.statuses
        match step:
            case EndUnclaimed():
                assert (claimed, known) == (False, True)
            case ReleaseReservation():
                assert phase == "reserved" or (claimed, known) == (False, False)
            case ReleaseClaim(devices=devices):
                assert (claimed, known) == (True, False)
                assert phase not in ("reserved", "restarting")
                assert entry is not None
                assert devices == entry.devices
            case FinishRetiring():
                assert (phase, known) == ("retiring", True)
            case FinishRestarting():
                assert phase == "restarting"
            case AwaitStart():
                assert (phase, known) == ("starting", True)


@given(WORLDS, st.data())
def test_once_all_are_taken_in_whatever_order_none_is_left(world: World, data: st.DataObject) -> None:
    before = world.state
    for step in data.draw(st.permutations(next_steps(world.state, world.statuses, world.reservations))):
        world.take(step)
    assert next_steps(world.state, world.statuses, world.reservations) == ()
    assert taken(world.state) <= taken(before)
    templates = {name for name, c in before.components.items() if c.watcher.index == 0}
    assert templates <= world.state.components.keys()


@given(WORLDS, st.data())
def test_broken_off_the_next_look_names_those_that_are_left(world: World, data: st.DataObject) -> None:
    steps = next_steps(world.state, world.statuses, world.reservations)
    for step in steps[: data.draw(st.integers(0, len(steps)))]:
        world.take(step)
        left = next_steps(world.state, world.statuses, world.reservations)
        assert set(left) <= set(steps) - {step}


@given(WORLDS)
def test_those_of_a_kind_stand_together_and_what_frees_devices_comes_first(world: World) -> None:
    kinds = [type(step) for step in next_steps(world.state, world.statuses, world.reservations)]
    order = [EndUnclaimed, ReleaseReservation, ReleaseClaim, FinishRetiring, FinishRestarting, AwaitStart]
    assert kinds == sorted(kinds, key=order.index)


@given(states(), SOME)
def test_unclaimed_are_those_known_that_hold_nothing(state: State, known: set[str]) -> None:
    holding = {name for name, component in state.components.items() if component.holds}
    assert unclaimed(state, known) == tuple(sorted(known - holding))


def test_a_replacement_is_awaited_and_the_one_before_it_left_until_it_retires() -> None:
    state = claim(disaggregated(), "dynamo_VllmWorker_1", role="decode", cmd="run", devices=[2], phase="starting")
    known = {"dynamo_Frontend", "dynamo_VllmWorker", "dynamo_VllmWorker_1", "dynamo_PrefillWorker"}
    assert next_steps(state, known, ()) == (AwaitStart("dynamo_VllmWorker_1"),)
    state = retire(settle(state, "dynamo_VllmWorker_1"), "dynamo_VllmWorker")
    assert next_steps(state, known, ()) == (FinishRetiring("dynamo_VllmWorker"),)


def test_a_claim_on_another_node_that_does_not_answer_is_left() -> None:
    state = claim(disaggregated(), "dynamo_VllmWorker_1", role="decode", cmd="run", devices=[0], node="far")
    known = dict.fromkeys(state.components, "active") | {"dynamo_VllmWorker_1": "unknown"}
    assert next_steps(state, known, ()) == ()


def test_a_restart_between_two_processes_is_kept() -> None:
    state = restart(disaggregated(), "dynamo_VllmWorker")
    known = {"dynamo_Frontend", "dynamo_PrefillWorker"}
    assert next_steps(state, known, ()) == (FinishRestarting("dynamo_VllmWorker"),)


def test_a_reservation_that_runs_or_is_claimed_by_now_has_no_second_step() -> None:
    state = reserve(disaggregated(), "dynamo_VllmWorker_1", role="decode", devices=[2])
    known = {*disaggregated().components, "dynamo_VllmWorker_1", "dynamo_VllmWorker_7"}
    reservations = ["dynamo_VllmWorker", "dynamo_VllmWorker_1", "dynamo_VllmWorker_7"]
    assert next_steps(state, known, reservations) == (
        EndUnclaimed("dynamo_VllmWorker_7"),
        ReleaseReservation("dynamo_VllmWorker_1"),
    )
