"""Actuators of endpoints and of the graph itself: changes side by side, and none in the scope of another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import FIRST_OF_MAIN, MAIN, endpoint_of
from dynamo_local.core.planning.actions import Action, AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.changes import UNDO_S
from dynamo_local.supervisor.circus.client import ACTIVE
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.statefile.transitions import claim, in_phase
from tests.unit.supervisor.actuator.fake_ports import FakePorts, FakeProcess, Killed, blueprint, revision_of, template

NO_LIMIT = DeviceLimits()
SLOTS = 6
REVISIONS = {MAIN: (FIRST_OF_MAIN,), "chat": ("chat@1", "chat@2"), "embed": ("embed@1",)}
"""By endpoint."""


def added(revision: str = "chat@1", service: str = "VllmWorker") -> AddWorker:
    return AddWorker("prefill" if service == "PrefillWorker" else "decode", service, revision)


def plan(slots: int = SLOTS) -> Blueprint:
    found = blueprint(slots)
    for revision in sum(REVISIONS.values(), start=()):
        if revision != FIRST_OF_MAIN:
            templates = (
                template("VllmWorker", "decode", 1, revision),
                template("PrefillWorker", "prefill", 1, revision),
            )
            found = found.with_revision(templates)
    return found


@pytest.fixture
def chat(fake: FakePorts) -> LocalActuator:
    return fake.actuator(plan(), "chat")


def names(fake: FakePorts) -> set[str]:
    return {name.removeprefix("dynamo_") for name in fake.processes}


async def test_workers_of_an_endpoint_start_side_by_side(fake: FakePorts, chat: LocalActuator) -> None:
    starting: set[int] = set()
    fake.checks.append(
        lambda: starting.add(
            sum(c.phase == "starting" and n in fake.processes for n, c in fake.state.components.items())
        )
    )
    outcomes = await chat.apply_all([added()] * 3, NO_LIMIT)
    assert [(one.done, one.watcher) for one in outcomes] == [
        (True, "dynamo_chat@1_VllmWorker"),
        (True, "dynamo_chat@1_VllmWorker_1"),
        (True, "dynamo_chat@1_VllmWorker_2"),
    ]
    assert max(starting) == 3
    assert {c.devices for c in fake.state.components.values() if endpoint_of(c.revision) == "chat"} == {
        (1,),
        (2,),
        (3,),
    }


async def test_one_that_fails_stops_no_other(fake: FakePorts) -> None:
    chat = fake.actuator(plan(slots=3), "chat")
    fake.starts["dynamo_chat@1_VllmWorker"] = "dies"
    changes: list[Action] = [added(), added(service="Nothing"), added(), added()]
    outcomes = await chat.apply_all(changes, NO_LIMIT)
    assert [one.action for one in outcomes] == changes
    assert [one.done for one in outcomes] == [False, False, True, False]
    assert "it ended" in outcomes[0].note
    assert "those of chat@1 are: VllmWorker, PrefillWorker" in outcomes[1].note
    assert "CPU slots" in outcomes[3].note
    assert names(fake) == {"Frontend", "VllmWorker", "chat@1_VllmWorker_1"}


async def test_removals_come_first_and_free_devices_for_additions(fake: FakePorts) -> None:
    chat = fake.actuator(plan(slots=3), "chat")
    await chat.apply_all([added(), added()], NO_LIMIT)
    leaving = [RemoveWorker(f"dynamo_chat@1_VllmWorker{index}", "decode") for index in ("", "_1")]
    outcomes = await chat.apply_all([added("chat@2"), *leaving, added("chat@2")], NO_LIMIT)
    assert all(one.done for one in outcomes)
    assert names(fake) == {"Frontend", "VllmWorker", "chat@2_VllmWorker", "chat@2_VllmWorker_1"}
    assert sorted(fake.ended) == [(one.watcher, 30.0, True) for one in leaving]


async def test_a_start_is_broken_off_and_the_other_workers_stay(fake: FakePorts, chat: LocalActuator) -> None:
    await chat.apply_all([added(), added("chat@2")], NO_LIMIT)
    fake.start = "hangs"
    starting = asyncio.create_task(chat.apply_all([added(), added()], NO_LIMIT))
    while "dynamo_chat@1_VllmWorker_2" not in fake.processes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    ended = [f"dynamo_chat@1_VllmWorker{index}" for index in ("_1", "_2")]
    for found in (tuple(ended), ()):
        assert await chat.break_off("chat@1") == found
    assert sorted(fake.ended) == [(name, UNDO_S, False) for name in ended]
    assert {"chat@1_VllmWorker", "chat@2_VllmWorker"} <= names(fake)
    assert not in_phase(fake.state, "starting")
    with pytest.raises(UsageError, match="no revision of"):
        await chat.break_off("embed@1")


async def test_the_workers_of_a_revision_end_with_all_that_is_under_way(fake: FakePorts, chat: LocalActuator) -> None:
    await chat.apply_all([added(), added(), added("chat@2")], NO_LIMIT)
    fake.start = "hangs"
    starting = asyncio.create_task(chat.apply(added(), NO_LIMIT))
    while "dynamo_chat@1_VllmWorker_2" not in fake.processes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    fake.watchers["dynamo_chat@1_VllmWorker_7"] = ACTIVE
    fake.processes["dynamo_chat@1_VllmWorker_7"] = FakeProcess("hangs", ())
    ended = await chat.end_revision("chat@1")
    assert set(ended) == {f"dynamo_chat@1_VllmWorker{index}" for index in ("", "_1", "_2", "_7")}
    deadlines = {name: deadline for name, deadline, _ in fake.ended}
    assert deadlines["dynamo_chat@1_VllmWorker_1"] == 30.0
    assert deadlines["dynamo_chat@1_VllmWorker_2"] == deadlines["dynamo_chat@1_VllmWorker_7"] == UNDO_S
    assert names(fake) == {"Frontend", "VllmWorker", "chat@2_VllmWorker"}
    assert {c.revision for c in fake.state.components.values()} == {"", FIRST_OF_MAIN, "chat@2"}
    assert await chat.end_revision("chat@1") == ()


@pytest.mark.parametrize(
    ("endpoint", "change"),
    [
        (MAIN, added()),
        ("embed", added()),
        ("chat", AddWorker("decode", "VllmWorker")),
        (MAIN, RemoveWorker("dynamo_chat@1_VllmWorker", "decode")),
        ("embed", Restart("dynamo_chat@1_VllmWorker", "decode")),
        ("chat", RemoveWorker("dynamo_VllmWorker", "decode")),
    ],
)
async def test_an_actuator_refuses_changes_of_others(
    fake: FakePorts, chat: LocalActuator, endpoint: str, change: Action
) -> None:
    await chat.apply(added(), NO_LIMIT)
    before = (fake.state, dict(fake.watchers))
    actuator = fake.actuator(plan(), endpoint)
    (together,) = await actuator.apply_all([change], NO_LIMIT)
    for outcome in (await actuator.apply(change, NO_LIMIT), together):
        assert not outcome.done
        assert f"among the workers of endpoint {endpoint}" in outcome.note
    assert (fake.state, fake.watchers) == before


@pytest.mark.parametrize("revision", ["", "embed@1"])
async def test_only_revisions_of_the_endpoint_are_ended(chat: LocalActuator, revision: str) -> None:
    with pytest.raises(UsageError, match="is no revision of the endpoint 'chat'"):
        await chat.end_revision(revision)


async def test_what_others_are_about_is_left_alone(fake: FakePorts, chat: LocalActuator) -> None:
    """A claim whose watcher is not there yet, and a watcher whose claim is not there any more, of two other scopes."""
    fake.state = claim(fake.state, "dynamo_VllmWorker_1", role="decode", cmd="x", devices=[1], phase="starting")
    fake.state = claim(fake.state, "dynamo_embed@1_VllmWorker", role="decode", cmd="x", devices=[2], phase="retiring")
    fake.watchers["dynamo_embed@1_VllmWorker_1"] = ACTIVE
    before = (fake.state, dict(fake.watchers))
    assert await chat.reconcile() == ()
    assert (fake.state, fake.watchers) == before
    assert await fake.actuator(plan(), "embed").reconcile() == (
        "dynamo_embed@1_VllmWorker_1 had no claim: it has ended",
        "dynamo_embed@1_VllmWorker has no process: its claim (devices [2]) is released",
    )
    assert fake.state.components["dynamo_VllmWorker_1"].phase == "starting"


async def test_the_last_worker_that_answers_is_told_by_its_own_model(fake: FakePorts) -> None:
    chat = fake.actuator(plan(slots=2), "chat")
    await chat.apply(added(), NO_LIMIT)
    change = Restart("dynamo_chat@1_VllmWorker", "decode")
    outcome = await chat.apply(change, NO_LIMIT)
    assert not outcome.done, "the graph's own worker answers no request for the endpoint"
    assert "no other one would answer" in outcome.note


class Operation(RuleBasedStateMachine):
    """Workers of two endpoints and of the graph come and go, by actuators that are killed or cancelled between any two
    steps, alone and at the same time."""

    fake: FakePorts
    scopes = st.sampled_from(sorted(REVISIONS))
    kills = st.none() | st.integers(0, 60)
    starts = st.sampled_from(["well", "well", "dies", "hangs"])

    @initialize()
    def begin(self) -> None:
        self.fake = FakePorts()
        self.fake.running("Frontend", "frontend")
        self.fake.running("VllmWorker", "decode", 0)
        self.fake.checks.append(self.check)

    @rule(data=st.data(), scope=scopes, start=starts, kill=kills, cancelled=st.booleans())
    def change_side_by_side(
        self, data: st.DataObject, scope: str, start: Any, kill: int | None, cancelled: bool
    ) -> None:
        self.fake.start = start
        others = self.elsewhere(scope)
        self.run(self.actuator(scope).apply_all(self.changes(data, scope), NO_LIMIT), kill, cancelled, scope)
        assert self.elsewhere(scope) == others

    @rule(data=st.data(), start=starts, kill=kills)
    def change_at_the_same_time(self, data: st.DataObject, start: Any, kill: int | None) -> None:
        self.fake.start = start
        changes = [(scope, self.changes(data, scope)) for scope in REVISIONS]
        works = [self.actuator(scope).apply_all(wanted, NO_LIMIT) for scope, wanted in changes]
        self.run(_all(works), kill, False, *REVISIONS)

    @rule(scope=scopes, start=st.sampled_from(["well", "hangs"]), kill=kills, cancelled=st.booleans())
    def reconcile(self, scope: str, start: Any, kill: int | None, cancelled: bool) -> None:
        self.fake.start = start
        others = self.elsewhere(scope)
        if self.run(self.actuator(scope).reconcile(), kill, cancelled, scope):
            assert asyncio.run(self.actuator(scope).reconcile()) == ()
        assert self.elsewhere(scope) == others

    @rule(revision=st.sampled_from(["chat@1", "chat@2", "embed@1"]), kill=kills, cancelled=st.booleans())
    def end_revision(self, revision: str, kill: int | None, cancelled: bool) -> None:
        scope = endpoint_of(revision)
        others = self.elsewhere(revision)
        if self.run(self.actuator(scope).end_revision(revision), kill, cancelled):
            assert not [
                n for n in (*self.fake.state.components, *self.fake.watchers, *self.fake.processes) if revision in n
            ]
        assert self.elsewhere(revision) == others

    @precondition(lambda self: self.workers())
    @rule(data=st.data())
    def lose_a_watcher(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.workers()))
        self.fake.processes.pop(name, None)
        self.fake.watchers.pop(name, None)

    @rule(revision=st.sampled_from(["chat@1", "embed@1", ""]), index=st.integers(1, 9))
    def somebody_adds_a_watcher(self, revision: str, index: int) -> None:
        name = f"dynamo_{revision}{'_' if revision else ''}VllmWorker_{index}"
        if name not in self.fake.state.components:
            self.fake.watchers.setdefault(name, ACTIVE)

    def changes(self, data: st.DataObject, scope: str) -> list[Action]:
        additions = st.sampled_from([added(r, s) for r in REVISIONS[scope] for s in ("VllmWorker", "PrefillWorker")])
        there = [(n, self.fake.state.components[n].role) for n in self.workers() if _scope(n) == scope]
        of_there = [st.sampled_from([RemoveWorker(*one) for one in there])] if there else []
        restarts = [st.sampled_from([Restart(*one, even_the_last=True) for one in there])] if there else []
        one: st.SearchStrategy[Action] = st.one_of(additions, *of_there, *restarts)
        return data.draw(st.lists(one, max_size=4, unique_by=str if data.draw(st.booleans()) else None))

    def workers(self) -> list[str]:
        return sorted(name for name, c in self.fake.state.components.items() if c.holds and "Worker" in name)

    def elsewhere(self, scope: str) -> Any:
        """Everything of other scopes, or of other revisions."""

        def is_other(name: str) -> bool:
            revision = revision_of(name)
            return scope not in (revision, endpoint_of(revision))

        found = {n: (c.devices, c.holds, c.phase) for n, c in self.fake.state.components.items() if is_other(n)}
        return found, set(filter(is_other, self.fake.watchers)), set(filter(is_other, self.fake.processes))

    def actuator(self, scope: str) -> LocalActuator:
        """A new one: it remembers nothing."""
        return self.fake.actuator(plan(), scope)

    def run(self, work: Coroutine[Any, Any, Any], kill: int | None, cancelled: bool, *scopes: str) -> bool:
        """Do the work, and break it off after so many steps. Returns whether it came to its end; the scopes are
        consistent then."""
        try:
            if not cancelled:
                self.fake.dies_after = kill
            asyncio.run(work if kill is None or not cancelled else self.cancelled(work, kill))
        except (Killed, asyncio.CancelledError):
            return False
        finally:
            self.fake.dies_after = None
            del self.fake.checks[1:]
        for scope in scopes:
            self.check_consistent(scope)
        return True

    async def cancelled(self, work: Coroutine[Any, Any, Any], after: int) -> Any:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        left = iter(range(after))

        def look() -> None:
            if next(left, None) is None:
                loop.call_soon_threadsafe(task.cancel)

        self.fake.checks.append(look)
        return await task

    def check(self) -> None:
        """Holds at every instant."""
        for name, process in self.fake.processes.items():
            assert self.fake.state.components[name].devices == process.devices, "it runs on devices it has not claimed"
            assert self.fake.held.issuperset(process.devices), "it runs on devices that its server does not hold"

    def check_consistent(self, scope: str) -> None:
        """Holds whenever no change of that scope is under way."""
        components = {name: c for name, c in self.fake.state.components.items() if _scope(name) == scope}
        assert [name for name, component in components.items() if component.phase is not None] == []
        holding = {name for name, component in components.items() if component.holds}
        there = (
            set(filter(lambda n: _scope(n) == scope, found)) for found in (self.fake.watchers, self.fake.processes)
        )
        assert list(there) == [holding, holding]

    def teardown(self) -> None:
        if hasattr(self, "fake"):
            self.fake.start = "well"
            for scope in REVISIONS:
                assert self.run(self.actuator(scope).reconcile(), None, False, scope)


def _scope(name: str) -> str:
    return endpoint_of(revision_of(name))


async def _all(works: list[Coroutine[Any, Any, Any]]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks)
    for error in [error for task in tasks if (error := task.exception()) is not None]:
        raise error


TestOperation = Operation.TestCase
TestOperation.settings = settings(max_examples=40, stateful_step_count=12)
