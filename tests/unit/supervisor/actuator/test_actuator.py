"""The actuator step by step, on ports that are kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_local.core.errors import SupervisorError, UsageError
from dynamo_local.core.planning.actions import Action, AddWorker, DeviceLimits, RemoveWorker, Restart, SwitchRole
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.changes import UNDO_S
from dynamo_local.supervisor.circus.client import ACTIVE, STOPPED
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.statefile.model import Phase, State
from state.statefile.transitions import claim, set_role
from tests.unit.state.builders import with_process
from tests.unit.supervisor.actuator.fake_ports import READY_S, FakePorts, FakeProcess, Killed, blueprint, template

NO_LIMIT = DeviceLimits()
ADD = AddWorker("decode", "VllmWorker")


def shape(state: State) -> dict[str, tuple[int, ...] | None]:
    """Watcher to devices; None for an emptied template."""
    return {name: c.resources.allocated_gpus for name, c in state.components.items() if "Worker" in name}


@pytest.fixture
def actuator(fake: FakePorts) -> LocalActuator:
    return fake.actuator(blueprint())


async def test_a_worker_goes_on_a_device_that_nobody_else_holds(fake: FakePorts, actuator: LocalActuator) -> None:
    fake.others = {1: "somebody", 2: "somebody"}
    assert (await actuator.apply(ADD, NO_LIMIT)).done
    assert shape(fake.state) == {"dynamo_VllmWorker": (0,), "dynamo_VllmWorker_1": (3,)}
    assert fake.held == {0, 3}
    outcome = await actuator.apply(ADD, NO_LIMIT)
    assert not outcome.done
    assert "CPU slot 1 is held by somebody; CPU slot 2 is held by somebody;" in outcome.note
    # There is none for another worker in its place either.
    assert (await actuator.apply(Restart("dynamo_VllmWorker", "decode"), NO_LIMIT)).watcher == "dynamo_VllmWorker"


async def test_a_worker_whose_device_another_server_was_faster_to_take_does_not_start(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    fake.faster = {1: "somebody"}
    outcome = await actuator.apply(ADD, NO_LIMIT)
    assert not outcome.done
    assert "a device was taken by somebody else; CPU slot 1 is held by somebody" in outcome.note
    assert shape(fake.state) == {"dynamo_VllmWorker": (0,)}
    assert set(fake.processes) == {"dynamo_Frontend", "dynamo_VllmWorker"}


async def test_a_device_is_let_go_with_its_worker(fake: FakePorts, actuator: LocalActuator) -> None:
    assert (await actuator.apply(ADD, NO_LIMIT)).done
    assert (await actuator.apply(RemoveWorker("dynamo_VllmWorker_1", "decode"), NO_LIMIT)).done
    assert fake.held == {0}


async def test_the_statefile_goes_through_the_documented_states(fake: FakePorts, actuator: LocalActuator) -> None:
    seen: list[dict[str, tuple[int, ...] | None]] = [shape(fake.state)]
    fake.checks.append(lambda: seen.append(shape(fake.state)) if seen[-1] != shape(fake.state) else None)
    for change in (
        ADD,
        RemoveWorker("dynamo_VllmWorker_1", "decode"),
        ADD,
        RemoveWorker("dynamo_VllmWorker", "decode"),
        RemoveWorker("dynamo_VllmWorker_1", "decode"),
        ADD,
    ):
        assert (await actuator.apply(change, NO_LIMIT)).done
    assert seen == [
        {"dynamo_VllmWorker": (0,)},
        {"dynamo_VllmWorker": (0,), "dynamo_VllmWorker_1": (1,)},
        {"dynamo_VllmWorker": (0,)},
        {"dynamo_VllmWorker": (0,), "dynamo_VllmWorker_1": (1,)},
        {"dynamo_VllmWorker": None, "dynamo_VllmWorker_1": (1,)},
        {"dynamo_VllmWorker": None},
        {"dynamo_VllmWorker": (0,)},
    ]


async def test_a_worker_that_is_added_runs_the_templates_command_on_its_own_device(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    outcome = await actuator.apply(ADD, NO_LIMIT)
    assert (outcome.done, outcome.watcher, outcome.note) == (True, "dynamo_VllmWorker_1", "ready")
    entry = fake.state.components["dynamo_VllmWorker_1"]
    assert (entry.role, entry.cmd, entry.devices, entry.phase) == ("decode", "run VllmWorker", (1,), None)
    assert entry.lease is not None


async def test_it_is_marked_from_its_claim_until_it_is_ready(fake: FakePorts, actuator: LocalActuator) -> None:
    phases: list[str | None] = []
    fake.checks.append(
        lambda: phases.append(c.phase) if (c := fake.state.components.get("dynamo_VllmWorker_1")) else None
    )
    await actuator.apply(ADD, NO_LIMIT)
    assert list(dict.fromkeys(phases)) == ["reserved", "starting", None]
    await actuator.apply(RemoveWorker("dynamo_VllmWorker_1", "decode"), NO_LIMIT)
    assert set(phases[phases.index(None) :]) == {None, "retiring"}


@pytest.mark.parametrize(("start", "why"), [("dies", "it ended"), ("hangs", f"not ready within {READY_S:g} s")])
async def test_one_that_does_not_become_ready_is_taken_back(
    fake: FakePorts, actuator: LocalActuator, start: Any, why: str
) -> None:
    before = fake.state
    fake.start = start
    outcome = await actuator.apply(ADD, NO_LIMIT)
    assert (outcome.done, outcome.note) == (False, f"dynamo_VllmWorker_1 did not start: {why}")
    assert fake.state == before
    assert set(fake.watchers) == set(fake.processes) == {"dynamo_Frontend", "dynamo_VllmWorker"}


async def test_decode_workers_are_taken_off_the_routers_before_they_are_told_to_end(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    fake.running("PrefillWorker", "prefill", 3)
    await actuator.apply(RemoveWorker("dynamo_VllmWorker", "decode"), NO_LIMIT)
    await actuator.apply(RemoveWorker("dynamo_PrefillWorker", "prefill"), NO_LIMIT)
    assert fake.ended == [("dynamo_VllmWorker", 30.0, True), ("dynamo_PrefillWorker", 30.0, False)]


async def test_without_a_bus_a_worker_is_still_removed(fake: FakePorts, actuator: LocalActuator) -> None:
    fake.bus_is_up = False
    assert (await actuator.apply(RemoveWorker("dynamo_VllmWorker", "decode"), NO_LIMIT)).done
    assert fake.ended == [("dynamo_VllmWorker", 30.0, False)]


@pytest.mark.parametrize(
    ("change", "limits", "why"),
    [
        (AddWorker("decode", "Frontend"), NO_LIMIT, "'Frontend' is not a service of workers"),
        (AddWorker("decode", "Nothing"), NO_LIMIT, "'Nothing' is not a service of workers"),
        (AddWorker("prefill", "VllmWorker"), NO_LIMIT, "workers of VllmWorker start in the role decode"),
        (AddWorker("aggregated"), NO_LIMIT, "no service has workers in the role 'aggregated'"),
        (ADD, DeviceLimits(1), "one more VllmWorker needs 1, workers hold 1, and may hold 1 devices"),
        (
            RemoveWorker("dynamo_Frontend", "frontend"),
            NO_LIMIT,
            "cannot remove Frontend among the workers of endpoint main",
        ),
        (RemoveWorker("dynamo_VllmWorker_7", "decode"), NO_LIMIT, "there are: VllmWorker"),
        (RemoveWorker("dynamo_VllmWorker", "prefill"), NO_LIMIT, "has the role decode by now"),
        (SwitchRole("dynamo_VllmWorker", "decode", "prefill"), NO_LIMIT, "stays in the role decode: not today"),
        (Restart("dynamo_VllmWorker_7", "decode"), NO_LIMIT, "there is no process 'dynamo_VllmWorker_7' by now"),
        (
            Restart("dynamo_Frontend", "frontend"),
            NO_LIMIT,
            "cannot restart Frontend among the workers of endpoint main",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    fake: FakePorts, actuator: LocalActuator, change: Action, limits: DeviceLimits, why: str
) -> None:
    before = (fake.state, dict(fake.watchers))
    outcome = await actuator.apply(change, limits)
    assert not outcome.done
    assert why in outcome.note
    assert (fake.state, fake.watchers) == before


async def test_without_a_component_the_role_names_the_template(fake: FakePorts, actuator: LocalActuator) -> None:
    outcome = await actuator.apply(AddWorker("prefill"), NO_LIMIT)
    assert (outcome.done, outcome.watcher) == (True, "dynamo_PrefillWorker")


async def test_devices_that_are_all_held_are_not_claimed(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(slots=2, devices=2))
    outcome = await actuator.apply(ADD, NO_LIMIT)
    assert not outcome.done
    assert "VllmWorker needs 2 devices, 1 of 2 CPU slots is free" in outcome.note


async def test_what_was_left_is_finished_before_the_next_change(fake: FakePorts, actuator: LocalActuator) -> None:
    fake.dies_after = 8
    with pytest.raises(Killed):
        await actuator.apply(RemoveWorker("dynamo_VllmWorker", "decode"), NO_LIMIT)
    assert fake.state.components["dynamo_VllmWorker"].phase == "retiring"
    fake.dies_after = None
    outcome = await actuator.apply(ADD, DeviceLimits(1))
    assert (outcome.done, outcome.watcher) == (True, "dynamo_VllmWorker")
    assert "dynamo_VllmWorker was left retiring: it has ended" in fake.report.lines


async def test_a_change_that_is_not_to_be_made_any_more_when_its_turn_comes_changes_nothing(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    def refuse() -> None:
        raise UsageError("its planner has ended")

    before = fake.state
    with pytest.raises(UsageError, match="its planner has ended"):
        await actuator.apply(AddWorker("decode", "VllmWorker"), DeviceLimits(), refuse)
    assert fake.state == before


async def test_changes_of_the_same_processes_take_turns_and_those_of_others_do_not_wait(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    plan = blueprint().with_revision([template("VllmWorker", "decode", 1, "chat@1")])
    fake.start = "hangs"
    first = asyncio.create_task(actuator.apply(ADD, NO_LIMIT))
    second = asyncio.create_task(fake.actuator(plan).apply(ADD, NO_LIMIT))
    other = asyncio.create_task(fake.actuator(plan, "chat").apply(AddWorker("decode", None, "chat@1"), NO_LIMIT))
    while not {"dynamo_VllmWorker_1", "dynamo_chat@1_VllmWorker"} <= fake.watchers.keys():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert "dynamo_VllmWorker_2" not in fake.state.components
    assert fake.report.lines.count("waiting for another change") == 1
    for name in ("dynamo_VllmWorker_1", "dynamo_chat@1_VllmWorker"):
        fake.processes[name].start = "well"
    fake.start = "well"
    assert [(await change).watcher for change in (first, second, other)] == [
        "dynamo_VllmWorker_1",
        "dynamo_VllmWorker_2",
        "dynamo_chat@1_VllmWorker",
    ]


async def test_what_runs_on_a_node_that_does_not_answer_keeps_its_claim(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    fake.state = claim(fake.state, "dynamo_VllmWorker_1", role="decode", cmd="run", devices=[0], node="far")
    before = fake.state
    assert await actuator.reconcile() == ()
    assert fake.state == before
    # Its device has the number of one here, and is another one.
    assert (await actuator.apply(ADD, NO_LIMIT)).done
    assert fake.state.components["dynamo_VllmWorker_2"].devices == (1,)
    with pytest.raises(SupervisorError, match="runs on node far, and this is local"):
        await actuator.apply(RemoveWorker("dynamo_VllmWorker_1", "decode"), NO_LIMIT)
    assert fake.state.components["dynamo_VllmWorker_1"].devices == (0,)


async def test_strange_watchers_are_ended_if_they_have_a_name_of_ours(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(), "")
    fake.watchers |= {"dynamo_Stray": ACTIVE, "somebody else's": ACTIVE}
    fake.processes["dynamo_Stray"] = FakeProcess("hangs", ())
    assert await actuator.reconcile() == ("dynamo_Stray had no claim: it has ended",)
    assert set(fake.watchers) == {"dynamo_Frontend", "dynamo_VllmWorker", "somebody else's"}
    assert fake.ended == [("dynamo_Stray", UNDO_S, False)]


RESTART = Restart("dynamo_VllmWorker", "decode")


async def test_a_worker_ends_only_when_the_one_in_its_place_is_ready(fake: FakePorts, actuator: LocalActuator) -> None:
    seen: list[dict[str, tuple[tuple[int, ...], Phase | None]]] = []

    def look() -> None:
        found = {n: (c.devices, c.phase) for n, c in fake.state.components.items() if "Worker" in n}
        if not seen or seen[-1] != found:
            seen.append(found)

    fake.checks.append(look)
    outcome = await actuator.apply(RESTART, NO_LIMIT)
    assert (outcome.done, outcome.watcher) == (True, "dynamo_VllmWorker_1")
    assert outcome.note == "in place of dynamo_VllmWorker"
    look()
    assert seen == [
        {"dynamo_VllmWorker": ((0,), None)},
        {"dynamo_VllmWorker": ((0,), None), "dynamo_VllmWorker_1": ((1,), "reserved")},
        {"dynamo_VllmWorker": ((0,), None), "dynamo_VllmWorker_1": ((1,), "starting")},
        # Both in one update: there is no moment at which whoever dies would leave one too many.
        {"dynamo_VllmWorker": ((0,), "retiring"), "dynamo_VllmWorker_1": ((1,), None)},
        {"dynamo_VllmWorker": ((), None), "dynamo_VllmWorker_1": ((1,), None)},
    ]
    assert fake.ended == [("dynamo_VllmWorker", 30.0, True)]


@pytest.mark.parametrize("start", ["dies", "hangs"])
async def test_a_worker_whose_successor_does_not_start_goes_on(
    fake: FakePorts, actuator: LocalActuator, start: Any
) -> None:
    before = fake.state
    fake.start = start
    outcome = await actuator.apply(RESTART, NO_LIMIT)
    assert not outcome.done
    assert "dynamo_VllmWorker_1 did not start" in outcome.note
    assert fake.state == before
    assert fake.revoked == set()


async def test_the_successor_takes_up_the_role_that_the_worker_has_by_now(
    fake: FakePorts, actuator: LocalActuator
) -> None:
    name = "dynamo_VllmWorker"
    lease = fake.state.components[name].lease
    assert lease is not None
    fake.state = set_role(fake.state, name, lease, "prefill")
    outcome = await actuator.apply(Restart(name, "prefill"), NO_LIMIT)
    assert outcome.done
    assert fake.state.components["dynamo_VllmWorker_1"].role == "prefill"


async def test_without_a_free_device_it_is_emptied_first_and_keeps_name_and_devices(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(slots=2))
    await actuator.apply(ADD, NO_LIMIT)
    before = fake.state.components["dynamo_VllmWorker"]
    outcome = await actuator.apply(RESTART, NO_LIMIT)
    assert (outcome.done, outcome.watcher, outcome.note) == (True, "dynamo_VllmWorker", "ready")
    after = fake.state.components["dynamo_VllmWorker"]
    assert (after.devices, after.cmd, after.phase) == (before.devices, before.cmd, None)
    assert after.lease not in (None, before.lease)
    assert fake.ended == [("dynamo_VllmWorker", 30.0, True)]


async def test_the_last_one_that_answers_is_restarted_in_place_by_force_alone(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(slots=1))
    before = fake.state
    outcome = await actuator.apply(RESTART, NO_LIMIT)
    assert not outcome.done
    assert "no device is free for a worker in place of dynamo_VllmWorker, and no other one" in outcome.note
    assert (fake.state, fake.ended) == (before, [])
    assert (await actuator.apply(Restart("dynamo_VllmWorker", "decode", even_the_last=True), NO_LIMIT)).done


async def test_a_worker_that_does_not_come_back_is_released(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(slots=2))
    await actuator.apply(ADD, NO_LIMIT)
    fake.start = "dies"
    outcome = await actuator.apply(RESTART, NO_LIMIT)
    assert (outcome.done, outcome.note) == (False, "dynamo_VllmWorker did not start: it ended")
    assert shape(fake.state) == {"dynamo_VllmWorker": None, "dynamo_VllmWorker_1": (1,)}


async def test_a_service_without_devices_is_restarted_under_its_name_even_after_it_could_not_be_started(
    fake: FakePorts,
) -> None:
    actuator = fake.actuator(blueprint(), "")
    fake.running("Router", "router")
    fake.start = "dies"
    change = Restart("dynamo_Router", "router")
    assert not (await actuator.apply(change, NO_LIMIT)).done
    assert "dynamo_Router" not in fake.watchers
    fake.start = "well"
    outcome = await actuator.apply(change, NO_LIMIT)
    assert (outcome.done, outcome.watcher, fake.watchers["dynamo_Router"]) == (True, "dynamo_Router", ACTIVE)
    assert fake.state.components["dynamo_Router"].holds


async def test_one_that_was_left_restarting_is_started_again(fake: FakePorts) -> None:
    actuator = fake.actuator(blueprint(slots=2))
    await actuator.apply(ADD, NO_LIMIT)
    fake.checks.append(lambda: _die_once_without(fake, "dynamo_VllmWorker"))
    with pytest.raises(Killed):
        await actuator.apply(RESTART, NO_LIMIT)
    assert fake.state.components["dynamo_VllmWorker"].phase == "restarting"
    fake.checks.clear()
    assert await actuator.reconcile() == ("dynamo_VllmWorker was left restarting: ready",)
    assert shape(fake.state) == {"dynamo_VllmWorker": (0,), "dynamo_VllmWorker_1": (1,)}
    assert await actuator.reconcile() == ()


def _die_once_without(fake: FakePorts, watcher: str) -> None:
    if watcher not in fake.watchers:
        raise Killed


class Operation(RuleBasedStateMachine):
    """Workers are added, removed and lost, by actuators that are killed between any two steps."""

    fake: FakePorts
    blueprint: Blueprint
    limits: DeviceLimits

    kills = st.none() | st.integers(0, 30)

    @initialize(devices=st.integers(1, 2), most=st.integers(1, 6))
    def begin(self, devices: int, most: int) -> None:
        self.blueprint = blueprint(slots=5, devices=devices)
        self.limits = DeviceLimits(max(most, devices + 1))
        self.fake = FakePorts()
        self.fake.running("Frontend", "frontend")
        self.fake.running("VllmWorker", "decode", *range(devices))
        self.fake.running("PrefillWorker", "prefill", 4)
        self.fake.checks.append(self.check)

    @rule(
        change=st.sampled_from([ADD, AddWorker("decode"), AddWorker("prefill", "PrefillWorker")]),
        start=st.sampled_from(["well", "well", "dies", "hangs"]),
        kill=kills,
    )
    def add(self, change: AddWorker, start: Any, kill: int | None) -> None:
        self.fake.start = start
        self.run(self.actuator.apply(change, self.limits), kill)

    @precondition(lambda self: self.workers())
    @rule(data=st.data(), kill=kills)
    def remove(self, data: st.DataObject, kill: int | None) -> None:
        name = data.draw(st.sampled_from(self.workers()))
        change = RemoveWorker(name, self.fake.state.components[name].role)
        self.run(self.actuator.apply(change, self.limits), kill)

    @rule(start=st.sampled_from(["well", "hangs"]), kill=kills)
    def reconcile(self, start: Any, kill: int | None) -> None:
        if self.run(self.actuator.reconcile(), kill):
            assert self.run_to_the_end(self.actuator.reconcile()) == ()

    @precondition(lambda self: self.workers())
    @rule(data=st.data(), start=st.sampled_from(["well", "well", "dies", "hangs"]), kill=kills)
    def restart(self, data: st.DataObject, start: Any, kill: int | None) -> None:
        self.fake.start = start
        name = data.draw(st.sampled_from(self.workers()))
        change = Restart(name, self.fake.state.components[name].role, even_the_last=data.draw(st.booleans()))
        self.run(self.actuator.apply(change, self.limits), kill)

    @precondition(lambda self: self.workers())
    @rule(data=st.data(), kills=st.lists(st.integers(0, 40), max_size=3))
    def restart_what_starts_well(self, data: st.DataObject, kills: list[int]) -> None:
        """However often whoever does it is killed, the fleet is as large afterwards as it was."""
        self.fake.start = "well"
        self.run_to_the_end(self.actuator.reconcile())
        if not (workers := self.workers()):
            return
        name, before = data.draw(st.sampled_from(workers)), self.roles()
        change = Restart(name, self.fake.state.components[name].role, even_the_last=True)
        for kill in kills:
            self.run(self.actuator.apply(change, self.limits), kill)
            if name not in self.workers():
                break
        self.run_to_the_end(self.actuator.reconcile())
        assert self.roles() == before

    @precondition(lambda self: self.workers())
    @rule(data=st.data())
    def lose_a_watcher(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.workers()))
        self.fake.processes.pop(name, None)
        self.fake.watchers.pop(name, None)

    @rule(index=st.integers(1, 9))
    def somebody_adds_a_watcher(self, index: int) -> None:
        name = f"dynamo_VllmWorker_{index}"
        if name not in self.fake.state.components and name not in self.fake.watchers:
            self.fake.watchers[name] = ACTIVE

    def workers(self) -> list[str]:
        return sorted(name for name, c in self.fake.state.components.items() if c.holds and "Worker" in name)

    def roles(self) -> list[str]:
        """The roles of all workers, sorted."""
        return sorted(self.fake.state.components[name].role for name in self.workers())

    @property
    def actuator(self) -> LocalActuator:
        """A new one: it remembers nothing."""
        return self.fake.actuator(self.blueprint)

    def run(self, work: Coroutine[Any, Any, Any], kill: int | None) -> bool:
        """Returns whether it came to its end; everything is consistent then."""
        self.fake.dies_after = kill
        try:
            asyncio.run(work)
        except Killed:
            return False
        finally:
            self.fake.dies_after = None
        self.check_consistent()
        return True

    def run_to_the_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def check(self) -> None:
        """Holds at every instant."""
        state, held = self.fake.state, 0
        for name, process in self.fake.processes.items():
            assert state.components[name].devices == process.devices, "it runs on devices that it has not claimed"
            assert self.fake.held.issuperset(process.devices), "it runs on devices that its server does not hold"
        for name, component in state.components.items():
            held += len(component.devices) if "Worker" in name else 0
        assert self.limits.max_devices is not None
        assert held <= self.limits.max_devices

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "fake"):
            self.check()

    def check_consistent(self) -> None:
        """Holds whenever no change is under way."""
        components = self.fake.state.components
        holding = {name for name, component in components.items() if component.holds}
        assert [name for name, component in components.items() if component.phase is not None] == []
        assert set(self.fake.watchers) == set(self.fake.processes) == holding
        assert {"dynamo_VllmWorker", "dynamo_PrefillWorker"} <= set(components), "a template is lost"

    def teardown(self) -> None:
        if hasattr(self, "fake"):
            self.fake.start = "well"
            assert self.run(self.actuator.reconcile(), None)


TestOperation = Operation.TestCase
TestOperation.settings = settings(max_examples=100, stateful_step_count=20)


def test_a_claim_of_a_start_that_never_happened_is_released(fake: FakePorts, actuator: LocalActuator) -> None:
    fake.state = claim(fake.state, "dynamo_VllmWorker_1", role="decode", cmd="x", devices=[1], phase="starting")
    notes = asyncio.run(actuator.reconcile())
    assert notes == ("dynamo_VllmWorker_1 has no process: its claim (devices [1]) is released",)
    assert shape(fake.state) == {"dynamo_VllmWorker": (0,)}


class LatePorts(FakePorts):
    """The old process announces itself at the last moment, and is killed."""

    async def end(self, name: str, deadline_s: float) -> None:
        del self.processes[name]
        self.watchers[name] = STOPPED
        self.state = with_process(self.state, name, "late", 4242)

    async def add(self, plan: WatcherPlan) -> None:
        assert self.state.components[plan.name].lease is None
        await super().add(plan)

    def is_ready(self, lease: str) -> bool:
        return lease == "late" or super().is_ready(lease)


async def test_the_old_one_is_not_taken_for_the_new_one() -> None:
    fake = LatePorts()
    fake.running("VllmWorker", "decode", 0)
    change = Restart("dynamo_VllmWorker", "decode", even_the_last=True)
    outcome = await fake.actuator(blueprint(slots=1)).apply(change, DeviceLimits())
    assert outcome.done, outcome
    component = fake.state.components["dynamo_VllmWorker"]
    assert (component.lease, component.phase) == (fake.processes["dynamo_VllmWorker"].lease, None)
