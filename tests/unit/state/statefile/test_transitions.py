from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.errors import StateError
from dynamo_local.core.names import Watcher
from state.devices.allocation import allocate, cpu_slots
from state.statefile.model import State, decode, encode
from state.statefile.transitions import (
    claim,
    claimed,
    clear_lease,
    entries,
    in_phase,
    new_state,
    next_watcher,
    release,
    remove,
    remove_revision,
    reserve,
    restart,
    retire,
    set_role,
    settle,
    shares_taken,
    taken,
)
from tests.unit.state.builders import OWNER, disaggregated, empty_state, with_process


def shape(state: State) -> dict[str, tuple[int, ...] | None]:
    """Watcher to devices; None for an emptied template."""
    return {name: c.resources.allocated_gpus for name, c in state.components.items()}


class TestPlannerDocument:
    """The sequence of states that Dynamo's planner documents."""

    initial: ClassVar[dict[str, tuple[int, ...] | None]] = {
        "dynamo_Frontend": (),
        "dynamo_VllmWorker": (0,),
        "dynamo_PrefillWorker": (1,),
    }

    def test_prefill_worker_removed_its_entry_stays_emptied(self) -> None:
        state = disaggregated()
        assert shape(state) == self.initial
        state = release(state, "dynamo_PrefillWorker")
        assert shape(state) == self.initial | {"dynamo_PrefillWorker": None}

    def test_decode_worker_added_and_removed(self) -> None:
        state = release(disaggregated(), "dynamo_PrefillWorker")
        state = claim(state, next_watcher(state, "VllmWorker"), role="decode", cmd="host", devices=[1])
        assert shape(state) == self.initial | {"dynamo_PrefillWorker": None, "dynamo_VllmWorker_1": (1,)}
        state = release(state, "dynamo_VllmWorker_1")
        assert shape(state) == self.initial | {"dynamo_PrefillWorker": None}

    def test_first_entry_goes_while_another_lives_and_stays_as_template(self) -> None:
        state = claim(disaggregated(), "dynamo_VllmWorker_1", role="decode", cmd="host", devices=[2])
        state = release(with_process(state, "dynamo_VllmWorker", "l", 7), "dynamo_VllmWorker")
        template = state.components["dynamo_VllmWorker"]
        assert shape(state) == self.initial | {"dynamo_VllmWorker": None, "dynamo_VllmWorker_1": (2,)}
        assert (template.lease, template.pid, template.cmd) == (None, None, "python -m host")

    def test_last_worker_of_a_role_leaves_the_template(self) -> None:
        state = release(disaggregated(), "dynamo_VllmWorker")
        assert shape(state) == self.initial | {"dynamo_VllmWorker": None}
        state = claim(state, next_watcher(state, "VllmWorker"), role="decode", cmd="host", devices=[3])
        assert shape(state) == self.initial | {"dynamo_VllmWorker": (3,)}


def test_a_new_state_is_empty() -> None:
    assert new_state("dynamo", "ipc:///s", "cpu-slot", OWNER, {"DYN_LOG": "x"}).components == {}


def test_the_lease_follows_the_process() -> None:
    state = with_process(disaggregated(), "dynamo_VllmWorker", "first", 10)
    state = with_process(state, "dynamo_VllmWorker", "second", 11)
    assert clear_lease(state, "dynamo_VllmWorker", "first") == state
    assert clear_lease(state, "dynamo_Unknown", "first") == state
    cleared = clear_lease(state, "dynamo_VllmWorker", "second")
    assert cleared == disaggregated()
    assert taken(cleared) == {0, 1}


def test_a_role_outlives_the_process_that_took_it_up() -> None:
    state = with_process(disaggregated(), "dynamo_VllmWorker", "first", 10)
    state = set_role(state, "dynamo_VllmWorker", "first", "prefill")
    assert state.components["dynamo_VllmWorker"].role == "prefill"
    state = with_process(clear_lease(state, "dynamo_VllmWorker", "first"), "dynamo_VllmWorker", "second", 11)
    entry = state.components["dynamo_VllmWorker"]
    assert (entry.role, entry.lease, entry.devices) == ("prefill", "second", (0,))
    # A process that starts anew, not in another one's place, has the role that it is started in.
    fresh = claim(release(state, "dynamo_VllmWorker"), "dynamo_VllmWorker", role="decode", cmd="python -m host")
    assert fresh.components["dynamo_VllmWorker"].role == "decode"


def test_a_worker_that_is_added_is_marked_until_it_is_settled() -> None:
    state = claim(disaggregated(), "dynamo_VllmWorker_1", role="decode", cmd="host", devices=[2], phase="starting")
    assert in_phase(state, "starting") == ("dynamo_VllmWorker_1",)
    state = with_process(state, "dynamo_VllmWorker_1", "lease", 7)
    assert in_phase(state, "starting") == ("dynamo_VllmWorker_1",)
    settled = settle(state, "dynamo_VllmWorker_1")
    assert in_phase(settled, "starting") == ()
    assert settle(settled, "dynamo_VllmWorker_1") == settled


def test_a_worker_that_retires_keeps_its_devices_until_it_is_gone() -> None:
    state = retire(disaggregated(), "dynamo_VllmWorker")
    assert retire(state, "dynamo_VllmWorker") == state
    assert in_phase(state, "retiring") == ("dynamo_VllmWorker",)
    assert taken(state) == {0, 1}
    assert next_watcher(state, "VllmWorker").index == 1
    state = release(clear_lease(state, "dynamo_VllmWorker", "l"), "dynamo_VllmWorker")
    assert in_phase(state, "retiring") == ()
    assert taken(state) == {1}


def test_a_worker_retires_in_the_move_in_which_the_one_in_its_place_is_settled() -> None:
    name, old = "dynamo_VllmWorker_1", "dynamo_VllmWorker"
    state = claim(disaggregated(), name, role="decode", cmd="host", devices=[2], phase="starting", replaces=old)
    settled = settle(state, name)
    assert (in_phase(settled, "starting"), in_phase(settled, "retiring")) == ((), (old,))
    assert settle(settled, name) == settled
    # The old one has gone by itself; the new one has been given up.
    assert in_phase(settle(release(state, old), name), "retiring") == ()
    assert in_phase(retire(state, name), "retiring") == (name,)
    assert release(state, name) == disaggregated()


def test_a_worker_that_restarts_keeps_name_and_devices_until_it_is_settled() -> None:
    name = "dynamo_VllmWorker"
    state = restart(disaggregated(), name)
    assert in_phase(state, "restarting") == (name,)
    assert taken(state) == {0, 1}
    assert settle(state, name) == disaggregated()


def test_a_name_may_be_given_in_parts() -> None:
    assert shape(release(disaggregated(), Watcher("dynamo", "VllmWorker")))["dynamo_VllmWorker"] is None


def test_entries_are_those_of_the_service_template_first() -> None:
    state = disaggregated()
    for index in (10, 2, 1):
        state = claim(state, f"dynamo_VllmWorker_{index}", role="decode", cmd="host")
    assert [entry.watcher.index for entry in entries(state, "VllmWorker")] == [0, 1, 2, 10]
    assert entries(state, "Worker") == ()
    assert next_watcher(state, "VllmWorker").index == 3


def of_revisions() -> State:
    """Two workers of chat@1, one of chat@2, and those of the graph."""
    state = disaggregated()
    for number, revision in enumerate(("chat@1", "chat@1", "chat@2"), 2):
        watcher = next_watcher(state, "VllmWorker", revision)
        state = claim(state, watcher, role="decode", cmd="host", devices=[number])
    return state


def test_each_revision_of_an_endpoint_has_entries_of_its_own() -> None:
    state = of_revisions()
    assert [entry.watcher_name for entry in entries(state, "VllmWorker")] == ["dynamo_VllmWorker"]
    assert [entry.watcher.index for entry in entries(state, "VllmWorker", "chat@1")] == [0, 1]
    assert str(next_watcher(state, "VllmWorker", "chat@2")) == "dynamo_chat@2_VllmWorker_1"
    assert remove(release(state, "dynamo_chat@2_VllmWorker"), "dynamo_chat@2_VllmWorker") == remove_revision(
        release(state, "dynamo_chat@2_VllmWorker"), "chat@2"
    )


def test_a_revision_without_processes_is_removed_as_a_whole() -> None:
    state = of_revisions()
    with pytest.raises(
        StateError, match="chat@1 still has processes: dynamo_chat@1_VllmWorker, dynamo_chat@1_VllmWork"
    ):
        remove_revision(state, "chat@1")
    emptied = release(release(state, "dynamo_chat@1_VllmWorker_1"), "dynamo_chat@1_VllmWorker")
    left = remove_revision(emptied, "chat@1")
    assert set(shape(left)) == {*shape(disaggregated()), "dynamo_chat@2_VllmWorker"}
    assert remove_revision(left, "chat@1") == left
    with pytest.raises(StateError, match="serve no revision"):
        remove_revision(left, "")


def far(state: State) -> State:
    """With a worker on device 0 of another node."""
    return claim(state, "dynamo_VllmWorker_1", role="decode", cmd="run", devices=[0], node="far")


def _checked(state: State, watcher: str) -> State:
    claimed(state, watcher)
    return state


def reserved(state: State) -> State:
    return reserve(state, "dynamo_VllmWorker_1", role="decode", devices=[5])


ILLEGAL: dict[str, Callable[[State], State]] = {
    "start without a claim": lambda s: _checked(s, "dynamo_Router"),
    "start of an emptied one": lambda s: _checked(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "start of a reserved one": lambda s: _checked(reserved(s), "dynamo_VllmWorker_1"),
    "claim of a claimed one": lambda s: claim(s, "dynamo_VllmWorker", role="", cmd=""),
    "claim of a taken device": lambda s: claim(s, "dynamo_VllmWorker_1", role="", cmd="", devices=[0]),
    "claim of a share of a taken device": lambda s: claim(
        s, "dynamo_VllmWorker_1", role="", cmd="", devices=[0], share=0.5
    ),
    "claim of a share of two devices": lambda s: claim(
        s, "dynamo_VllmWorker_1", role="", cmd="", devices=[5, 6], share=0.5
    ),
    "claim of a share of nothing": lambda s: claim(s, "dynamo_VllmWorker_1", role="", cmd="", share=0.5),
    "claim of a device twice": lambda s: claim(s, "dynamo_VllmWorker_1", role="", cmd="", devices=[5, 5]),
    "addition without template": lambda s: claim(s, "dynamo_Router_1", role="", cmd=""),
    "claim in another namespace": lambda s: claim(s, "other_Router", role="", cmd=""),
    "claim of no watcher's name": lambda s: claim(s, "router", role="", cmd=""),
    "reservation of a taken device": lambda s: reserve(s, "dynamo_VllmWorker_1", role="", devices=[0]),
    "reservation for a claimed one": lambda s: reserve(s, "dynamo_VllmWorker", role="", devices=[5]),
    "reservation twice": lambda s: reserve(reserved(s), "dynamo_VllmWorker_1", role="", devices=[6]),
    "reservation without template": lambda s: reserve(s, "dynamo_Router_1", role=""),
    "claim of other devices than are reserved": lambda s: claim(
        reserved(s), "dynamo_VllmWorker_1", role="", cmd="", devices=[6]
    ),
    "claim of another share than is reserved": lambda s: claim(
        reserved(s), "dynamo_VllmWorker_1", role="", cmd="", devices=[5], share=0.5
    ),
    "settling of a reserved one": lambda s: settle(reserved(s), "dynamo_VllmWorker_1"),
    "restart of a reserved one": lambda s: restart(reserved(s), "dynamo_VllmWorker_1"),
    "claim of a device of another node than is reserved": lambda s: claim(
        reserved(s), "dynamo_VllmWorker_1", role="", cmd="", devices=[5], node="far"
    ),
    "claim of a taken device of another node": lambda s: claim(
        far(s), "dynamo_VllmWorker_2", role="", cmd="", devices=[0], node="far"
    ),
    "claim on what is no node": lambda s: claim(s, "dynamo_VllmWorker_1", role="", cmd="", node="a/b"),
    "role for an unknown one": lambda s: set_role(s, "dynamo_Router", "l", "prefill"),
    "role for an emptied one": lambda s: set_role(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker", "l", "prefill"),
    "role for one without a process": lambda s: set_role(s, "dynamo_VllmWorker", "l", "prefill"),
    "role for a process that was replaced": lambda s: set_role(
        with_process(s, "dynamo_VllmWorker", "second", 11), "dynamo_VllmWorker", "first", "prefill"
    ),
    "settling of one that is to end": lambda s: settle(retire(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "settling of an emptied one": lambda s: settle(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "restart of one that is to end": lambda s: restart(retire(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "restart of an emptied one": lambda s: restart(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "replacement that does not start": lambda s: claim(
        s, "dynamo_VllmWorker_1", role="", cmd="", replaces="dynamo_VllmWorker"
    ),
    "retirement of an unknown one": lambda s: retire(s, "dynamo_Router"),
    "retirement of an emptied one": lambda s: retire(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "release of an unknown one": lambda s: release(s, "dynamo_Router"),
    "release of an emptied one": lambda s: release(release(s, "dynamo_VllmWorker"), "dynamo_VllmWorker"),
    "removal of an unknown one": lambda s: remove(s, "dynamo_Router"),
    "removal of a template in use": lambda s: remove(
        claim(s, "dynamo_VllmWorker_1", role="", cmd=""), "dynamo_VllmWorker"
    ),
}


@pytest.mark.parametrize("move", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_move_raises_and_changes_nothing(move: Callable[[State], State]) -> None:
    state = disaggregated()
    before = encode(state)
    with pytest.raises(StateError):
        move(state)
    assert encode(state) == before


def test_a_device_is_one_of_a_node() -> None:
    state = far(disaggregated())
    assert decode(encode(state)) == state
    assert [c.devices for c in entries(state, "VllmWorker")] == [(0,), (0,)]
    assert "dynamo_VllmWorker_1" not in state.here
    # The other one's devices are not ours to give out, or to free.
    assert taken(state) == taken(disaggregated()) == shares_taken(state).keys()
    assert taken(release(state, "dynamo_VllmWorker")) == {1}


def test_removal_rolls_a_claim_back() -> None:
    state = claim(disaggregated(), "dynamo_Router", role="", cmd="", devices=[7])
    assert remove(state, "dynamo_Router") == disaggregated()


class Fleet(RuleBasedStateMachine):
    """Claims and releases in any order, against a plain model of who holds what."""

    inventory = cpu_slots(range(6), 6)
    services = st.sampled_from(["VllmWorker", "PrefillWorker"])

    def __init__(self) -> None:
        super().__init__()
        self.state = empty_state()
        self.held: dict[str, tuple[int, ...]] = {}
        self.seen: set[str] = set()

    @rule(service=services, count=st.integers(0, 2), first=st.booleans())
    def add(self, service: str, count: int, first: bool) -> None:
        """`first`: whether devices are reserved before they are claimed."""
        if count > 6 - sum(map(len, self.held.values())):
            return
        watcher = next_watcher(self.state, service)
        devices = allocate(self.inventory, shares_taken(self.state), count)
        if first:
            self.state = reserve(self.state, watcher, role="worker", devices=devices)
        self.state = claim(self.state, watcher, role="worker", cmd="run", devices=devices, phase="starting")
        assert str(watcher) not in self.held
        self.held[str(watcher)] = devices
        self.seen.add(service)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        if data.draw(st.booleans()):
            self.state = retire(self.state, name)
        self.state = release(with_process(self.state, name, "lease", 5), name)
        del self.held[name]

    @invariant()
    def entries_are_the_holders_and_the_templates(self) -> None:
        holding = {n: c.devices for n, c in self.state.components.items() if c.holds}
        emptied = {n for n, c in self.state.components.items() if not c.holds}
        assert holding == self.held
        assert emptied == {f"dynamo_{service}" for service in self.seen} - set(self.held)

    @invariant()
    def it_can_be_written_and_read(self) -> None:
        assert decode(encode(self.state)) == self.state


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=50, stateful_step_count=20)
