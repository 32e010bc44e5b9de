"""The changes that `dynamo scale`, `dynamo drain` and `dynamo restart` plan, and which planner acts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DecodeError, DeviceError, SupervisorError, UsageError
from dynamo_local.core.names import FIRST_OF_MAIN, endpoint_named
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.supervisor.actuator.changes import (
    claim_reserved,
    devices_held,
    retire_worker,
    template_of,
)
from dynamo_local.supervisor.actuator.commands import ActingPlanner, plan_drain, plan_restart, plan_scaling
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from state.devices.allocation import allocate
from state.files import make_run_directory
from state.paths import StatePaths
from state.statefile.model import State
from state.statefile.transitions import claim, entries, next_watcher, release, retire, shares_taken, taken
from tests.unit.state.builders import disaggregated
from tests.unit.supervisor.actuator.fake_ports import blueprint, template

SLOTS = 6
PLAN = blueprint(SLOTS)
ADD = AddWorker("decode", "VllmWorker")


def planned(state: State, *, force: bool = False, **targets: int) -> tuple[object, ...]:
    return plan_scaling(state, PLAN, targets, even_the_last=force)


def with_one_more(state: State, plan: Blueprint, change: AddWorker, limits: DeviceLimits) -> State:
    """The state with one more worker, on devices of which enough is left."""
    template = template_of(plan, change)
    devices = allocate(plan.inventory, shares_taken(state), template.devices, share=template.share)
    watcher = next_watcher(state, template.service, template.revision)
    return claim_reserved(state, template, plan_watcher(template, watcher, plan.inventory, devices), limits)


def carried_out(state: State, *changes: object) -> State:
    """The state once the changes are complete."""
    for change in changes:
        if isinstance(change, AddWorker):
            state = with_one_more(state, PLAN, change, DeviceLimits())
        else:
            assert isinstance(change, RemoveWorker)
            state = release(retire_worker(state, change), change.watcher)
    return state


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("chat", "chat"),
        ("my-chat-2", "my-chat-2"),
        ("chat@2_VllmWorker", "chat"),
        ("dynamo_chat@2_VllmWorker_1", "chat"),
        ("VllmWorker", ""),
        ("VllmWorker_1", ""),
        ("dynamo_VllmWorker", ""),
    ],
)
def test_names_of_endpoints_and_of_their_workers_are_told_from_those_of_services(name: str, endpoint: str) -> None:
    assert endpoint_named(name) == endpoint


def with_endpoint() -> State:
    """Beside the graph's own: two workers of chat, one of its next revision, and one of another endpoint."""
    state = disaggregated()
    for name in ("chat@1_VllmWorker", "chat@1_VllmWorker_1", "chat@2_VllmWorker", "embed@1_VllmWorker"):
        state = claim(state, f"dynamo_{name}", role="decode", cmd="run")
    return state


def test_a_worker_of_an_endpoint_is_not_drained_by_hand() -> None:
    with pytest.raises(
        UsageError, match=r"endpoint chat, whose number of workers the server keeps; `dynamo scale chat="
    ):
        plan_drain(with_endpoint(), PLAN, "chat@1_VllmWorker_1", even_the_last=True)


def test_all_workers_of_an_endpoint_are_restarted_or_the_one_that_is_named() -> None:
    plan = PLAN.with_revision([template("VllmWorker", "decode", 1, revision) for revision in ("chat@1", "chat@2")])
    state = retire(with_endpoint(), "dynamo_chat@1_VllmWorker")
    found = [Restart(f"dynamo_{name}", "decode") for name in ("chat@1_VllmWorker_1", "chat@2_VllmWorker")]
    assert plan_restart(state, plan, "chat", even_the_last=False) == tuple(found)
    for name in ("chat@2_VllmWorker", "dynamo_chat@2_VllmWorker"):
        assert plan_restart(state, plan, name, even_the_last=False) == (found[1],)
    assert plan_restart(state, plan, "VllmWorker", even_the_last=False) == (Restart("dynamo_VllmWorker", "decode"),)
    with pytest.raises(UsageError, match="no service, endpoint or watcher 'talk'; there are: "):
        plan_restart(state, plan, "talk", even_the_last=False)


def test_workers_of_endpoints_answer_none_of_the_graphs_requests_and_hold_devices() -> None:
    state = claim(with_endpoint(), "dynamo_chat@2_VllmWorker_1", role="decode", cmd="run", devices=[4, 5])
    with pytest.raises(UsageError, match="no worker would be left to answer requests without dynamo_VllmWorker;"):
        planned(state, VllmWorker=0)
    with pytest.raises(DeviceError, match="that takes 7 devices"):
        planned(state, VllmWorker=4)


def test_the_highest_suffix_goes_first_and_removals_precede_additions() -> None:
    state = carried_out(disaggregated(), ADD, ADD)
    assert planned(state, VllmWorker=1, PrefillWorker=2) == (
        RemoveWorker("dynamo_VllmWorker_2", "decode"),
        RemoveWorker("dynamo_VllmWorker_1", "decode"),
        AddWorker("prefill", "PrefillWorker"),
    )
    assert planned(state, VllmWorker=3) == ()


def test_devices_of_those_that_leave_count_as_free() -> None:
    state = carried_out(disaggregated(), *[ADD] * (SLOTS - 2))
    assert len(planned(state, PrefillWorker=3, VllmWorker=3)) == 4
    with pytest.raises(DeviceError, match="that takes 7 devices, and there are 6 CPU slots"):
        planned(state, PrefillWorker=2)


def test_devices_that_others_hold_do_not_count() -> None:
    state = carried_out(disaggregated(), ADD)
    others = {0: "nobody: it is ours", 5: "somebody"}
    planned = plan_scaling(state, PLAN, {"VllmWorker": 4}, even_the_last=False, elsewhere=others)
    assert len(planned) == 2
    with pytest.raises(
        DeviceError, match="takes 6 devices, and there are 6 CPU slots; CPU slot 5 is held by somebody;"
    ):
        plan_scaling(state, PLAN, {"VllmWorker": 5}, even_the_last=False, elsewhere=others)


def test_the_last_worker_that_answers_requests_needs_force() -> None:
    refused = "no worker would be left to answer requests without dynamo_VllmWorker;"
    with pytest.raises(UsageError, match=refused):
        planned(disaggregated(), VllmWorker=0, PrefillWorker=2)
    with pytest.raises(UsageError, match=refused):
        drained(force=False)
    assert planned(disaggregated(), PrefillWorker=0) == (RemoveWorker("dynamo_PrefillWorker", "prefill"),)
    assert planned(disaggregated(), force=True, VllmWorker=0) == drained(force=True)


def drained(*, force: bool) -> tuple[object, ...]:
    return plan_drain(disaggregated(), PLAN, "dynamo_VllmWorker", even_the_last=force)


@pytest.mark.parametrize("watcher", ["dynamo_Frontend", "dynamo_VllmWorker_1", "VllmWorker_1", "Frontend", ""])
def test_only_workers_are_drained(watcher: str) -> None:
    with pytest.raises(UsageError, match="there are: VllmWorker, PrefillWorker"):
        plan_drain(disaggregated(), PLAN, watcher, even_the_last=True)


def test_a_drain_is_one_worker_less_and_that_one_whatever_the_others_hold() -> None:
    state = carried_out(disaggregated(), ADD, ADD)
    for name in ("dynamo_VllmWorker", "dynamo_VllmWorker_1", "dynamo_VllmWorker_2"):
        assert plan_drain(state, PLAN, name, even_the_last=False) == (RemoveWorker(name, "decode"),)
    # Devices may be lost with a node of the cluster.
    shrunk = msgspec.structs.replace(PLAN, cluster_devices=1.0)
    assert len(plan_drain(state, shrunk, "VllmWorker_1", even_the_last=False)) == 1


@pytest.mark.parametrize("name", ["dynamo_VllmWorker_1", "VllmWorker_1"])
def test_a_worker_is_named_in_full_or_without_its_namespace(name: str) -> None:
    state = carried_out(disaggregated(), ADD)
    assert plan_drain(state, PLAN, name, even_the_last=False) == (RemoveWorker("dynamo_VllmWorker_1", "decode"),)
    assert restarts(state, name) == (Restart("dynamo_VllmWorker_1", "decode"),)


def test_a_worker_of_another_namespace_is_told_from_none() -> None:
    with pytest.raises(UsageError, match=r"belongs to namespace second, not to dynamo; add --namespace"):
        plan_drain(disaggregated(), PLAN, "second_VllmWorker", even_the_last=True)


@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))
def test_carried_out_a_plan_gives_what_was_asked_for_or_there_is_none(d0: int, p0: int, d1: int, p1: int) -> None:
    state = disaggregated()
    for decode, prefill in ((d0, p0), (d1, p1)):
        targets = {"VllmWorker": decode, "PrefillWorker": prefill}
        if decode + prefill > SLOTS:
            with pytest.raises(DeviceError):
                planned(state, force=True, **targets)
            continue
        state = carried_out(state, *planned(state, force=True, **targets))
        found = {name: sum(c.holds for c in state.components.values() if c.component == name) for name in targets}
        assert found == targets
        assert devices_held(state) == len(taken(state)) == decode + prefill


def test_a_blueprint_is_for_its_owner_alone(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "n")
    make_run_directory(paths)
    path = paths.blueprint_file
    with pytest.raises(SupervisorError, match="the server in namespace n is only starting; `dynamo wait`"):
        Blueprint.read(paths)
    PLAN.write(path)
    assert Blueprint.read(paths) == PLAN
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(msgspec.json.encode({"circusd_pid": 1}))
    with pytest.raises(DecodeError, match="not a blueprint"):
        Blueprint.read(paths)


def restarts(state: State, name: str) -> tuple[object, ...]:
    return plan_restart(state, PLAN, name, even_the_last=False)


def test_all_workers_of_a_service_are_restarted_or_the_one_that_is_named() -> None:
    state = release(carried_out(disaggregated(), ADD, ADD), "dynamo_VllmWorker_1")
    assert restarts(state, "VllmWorker") == (
        Restart("dynamo_VllmWorker", "decode"),
        Restart("dynamo_VllmWorker_2", "decode"),
    )
    assert restarts(state, "dynamo_VllmWorker_2") == (Restart("dynamo_VllmWorker_2", "decode"),)


def test_a_template_of_workers_is_not_restarted_and_one_of_another_service_is_begun() -> None:
    state = claim(disaggregated(), "dynamo_Router", role="router", cmd="run Router")
    assert restarts(release(state, "dynamo_Router"), "Router") == (Restart("dynamo_Router", "router"),)
    empty = release(disaggregated(), "dynamo_PrefillWorker")
    for name in ("PrefillWorker", "dynamo_PrefillWorker"):
        with pytest.raises(UsageError, match="PrefillWorker has no workers; `dynamo scale PrefillWorker=1` starts one"):
            restarts(empty, name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Frontend", "Frontend holds the clients' connections"),
        ("dynamo_Frontend", "Frontend holds the clients' connections"),
        (
            "dynamo_VllmWorker_9",
            "there is no service, endpoint or watcher 'dynamo_VllmWorker_9'; there are: .*VllmWorker, ",
        ),
    ],
)
def test_what_cannot_be_restarted_is_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        restarts(disaggregated(), name)


def test_a_blueprint_has_the_templates_of_revisions_beside_the_graphs() -> None:
    first, second = template("VllmWorker", "decode", 1, "chat@1"), template("VllmWorker", "decode", 2, "chat@2")
    plan = PLAN.with_revision([first]).with_revision([second])
    assert plan.revisions == {FIRST_OF_MAIN, "chat@1", "chat@2"}
    assert plan.worker("VllmWorker", FIRST_OF_MAIN).revision == FIRST_OF_MAIN
    assert plan.worker("VllmWorker", "chat@2") == plan.worker_in("decode", "chat@2") == second
    changed = msgspec.structs.replace(first, argv=("another",))
    assert plan.with_revision([changed]).template("VllmWorker", "chat@1") == changed
    assert plan.without_revision("chat@1").without_revision("chat@2") == PLAN
    with pytest.raises(UsageError, match="'Router'; those of chat@1 are: VllmWorker"):
        plan.restartable("Router", "chat@1")


def test_the_blueprint_file_is_changed_until_the_server_ends(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "n")
    make_run_directory(paths)
    file = BlueprintFile(paths)
    assert not file.revisions()
    assert file.of_revisions() == ()
    file.write(PLAN)
    added = template("VllmWorker", "decode", 1, "chat@1")
    changed = file.change(lambda blueprint: blueprint.with_revision([added]))
    assert changed == Blueprint.read(paths) == BlueprintFile(paths).current()
    assert file.revisions() == {FIRST_OF_MAIN, "chat@1"}
    assert added in file.of_revisions()
    # Removed by somebody: until it is written anew, it is as it was.
    paths.blueprint_file.unlink()
    assert file.current() == changed
    assert file.change(lambda blueprint: blueprint.without_revision("chat@1")) == PLAN
    file.end()
    with pytest.raises(SupervisorError):
        file.change(lambda blueprint: blueprint)
    file.write(PLAN)
    assert not paths.blueprint_file.exists()


def shared(share: float, slots: int = 2) -> Blueprint:
    """Decode workers with such a share of a slot, and prefill workers with a whole one."""
    made = blueprint(slots)
    first, *others = made.templates
    return msgspec.structs.replace(made, templates=(msgspec.structs.replace(first, share=share), *others))


def with_shares(state: State, plan: Blueprint, number: int, most: int | None = None) -> State:
    for _ in range(number):
        state = with_one_more(state, plan, ADD, DeviceLimits(most))
    return state


def test_shares_count_as_what_they_are_in_the_budget() -> None:
    plan = shared(0.5, 4)
    state = with_shares(release(disaggregated(), "dynamo_VllmWorker"), plan, 4, most=3)
    assert devices_held(state) == 3
    with pytest.raises(DeviceError, match=r"one more VllmWorker needs 0\.5, workers hold 3, and may hold 3 devices"):
        with_shares(state, plan, 1, most=3)
    assert [entry.devices for entry in entries(state, "VllmWorker")] == [(0,), (0,), (2,), (2,)]


def test_more_shares_than_fit_are_refused_before_anything_changes() -> None:
    plan = shared(0.7, 3)
    state = with_shares(release(disaggregated(), "dynamo_VllmWorker"), plan, 1)
    assert len(plan_scaling(state, plan, {"VllmWorker": 2}, even_the_last=False)) == 1
    # 2.4 devices of 3 would be held, but no device has 0.7 left.
    freed = release(state, "dynamo_PrefillWorker")
    assert len(plan_scaling(freed, plan, {"VllmWorker": 3}, even_the_last=False)) == 2
    with pytest.raises(DeviceError, match=r"VllmWorker needs 0\.7 of a device, no CPU slot of 3 has as much room"):
        plan_scaling(freed, plan, {"VllmWorker": 4}, even_the_last=False)
    # What leaves makes room.
    assert (
        len(plan_scaling(with_shares(freed, plan, 2), plan, {"VllmWorker": 2, "PrefillWorker": 1}, even_the_last=False))
        == 2
    )


@pytest.fixture
def another() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_one_planner_acts_until_its_process_ends(another: subprocess.Popen[bytes]) -> None:
    planner, mine = ActingPlanner("dynamo"), os.getpid()
    planner.begin(another.pid)
    planner.begin(another.pid)
    planner.check(another.pid)
    with pytest.raises(UsageError, match=f"process {another.pid} is the planner of namespace dynamo already; end it"):
        planner.begin(mine)
    with pytest.raises(UsageError, match=f"process {mine} is not the planner that acts"):
        planner.check(mine)
    another.kill()
    another.wait()
    with pytest.raises(UsageError, match="is not the planner that acts"):
        planner.check(another.pid)
    planner.begin(mine)
    planner.check(mine)


def test_a_process_that_is_not_there_does_not_act() -> None:
    with pytest.raises(UsageError, match="there is no process 0"):
        ActingPlanner("dynamo").begin(0)
