"""Which processes the statefile has, by their presences, in any order of what is heard and what is changed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.fleet.view import Change, FleetView, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import Revision, Watcher
from dynamo_local.supervisor.circus import process_registry as module
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.endpoints.revisions.observing import workers_of
from state.locks import FileLock
from state.machine.identity import machine_id
from state.paths import StatePaths
from state.statefile.model import Component, State
from state.statefile.store import StateStore
from state.statefile.transitions import (
    claim,
    clear_lease,
    heard,
    release,
    reserve,
    restart,
    retire,
    set_role,
    settle,
    unclaim,
)
from tests.unit.state.builders import disaggregated, empty_state, forked, with_process
from tests.unit.supervisor.recording import RecordingReport

FAR, HERE = "dynamo_VllmWorker", "dynamo_Router"


def presence(watcher: str, lease: str, role: str = "decode", pid: int = 77) -> Presence:
    service = watcher.split("_")[1]
    return Presence(watcher, service, role, lease, pid, "ready", machine=machine_id())


def both() -> State:
    state = claim(empty_state(), FAR, role="decode", cmd="run", devices=(0,), node="n1")
    return claim(state, HERE, role="router", cmd="run")


def told(component: Component) -> tuple[str | None, int | None, str]:
    return component.lease, component.pid, component.role


@pytest.mark.parametrize("watcher", [FAR, HERE])
def test_a_process_has_the_lease_pid_and_role_that_it_announces(watcher: str) -> None:
    state = heard(both(), [presence(watcher, "lease", "prefill")], lambda _: True)
    assert told(state.components[watcher]) == ("lease", 77, "prefill")


@pytest.mark.parametrize("watcher", [FAR, HERE])
def test_of_whom_nothing_is_heard_the_last_word_counts(watcher: str) -> None:
    state = heard(both(), [presence(watcher, "lease", "prefill")], lambda _: True)
    assert heard(state, [], lambda _: True) is state


def test_who_has_ended_here_or_is_elsewhere_is_not_taken_for_the_process_that_is_to_start() -> None:
    presences = [presence(FAR, "lease"), presence(HERE, "lease")]
    state = heard(both(), presences, lambda _: False)
    assert [state.components[name].lease for name in (FAR, HERE)] == ["lease", None]


@pytest.mark.parametrize("node", ["n1", None])
def test_what_is_only_reserved_has_no_process(node: str | None) -> None:
    only = reserve(empty_state(), FAR, role="decode", devices=(0,), node=node)
    assert heard(only, [presence(FAR, "lease")], lambda _: True) is only


def test_templates_and_strangers_have_none() -> None:
    state = release(disaggregated(), FAR)
    assert heard(state, [presence(FAR, "x"), presence(f"{FAR}_7", "y"), presence("a_b", "z")], lambda _: True) is state


def test_a_worker_that_is_heard_is_ready_before_it_is_written_down(tmp_path: Path) -> None:
    store, watcher, view = StateStore(StatePaths(tmp_path, "dynamo")), "dynamo_chat@1_VllmWorker", FleetView()
    store.create(claim(empty_state(), watcher, role="aggregated", cmd="run"))
    registration = Registration(store, view.members, RecordingReport())
    worker = Presence(watcher, "VllmWorker", "aggregated", "lease", os.getpid(), "ready", machine=machine_id())
    for change in view.observe(worker, 0.0):
        registration.on_change(change)

    def ready(state: State) -> tuple[str, ...]:
        return workers_of(state, Revision("chat", 1), view)[0].ready

    assert ready(store.read()) == ()
    assert ready(registration.read()) == (watcher,)


class Scene:
    """A statefile that follows a view of the fleet."""

    def __init__(self, root: Path) -> None:
        self.paths = StatePaths(root, "dynamo")
        self.store = StateStore(self.paths, lock_timeout_s=0.05)
        self.store.create(both())
        self.view = FleetView()
        self.report = RecordingReport()
        self.registration = Registration(self.store, self.view.members, self.report)

    def hear(self, presence: Presence) -> None:
        for change in self.view.observe(presence, 0.0):
            self.registration.on_change(change)

    def told(self, watcher: str) -> tuple[str | None, int | None, str]:
        return told(self.store.read().components[watcher])

    async def until(self, watcher: str, *expected: object) -> None:
        async with asyncio.timeout(10.0):
            while self.told(watcher) != expected:  # noqa: ASYNC110  # a file gives no event
                await asyncio.sleep(0.005)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_each_process_is_written_down_as_soon_as_it_is_heard(scene: Scene) -> None:
    running = asyncio.create_task(scene.registration.run())
    scene.hear(presence(HERE, "first", "router", os.getpid()))
    await scene.until(HERE, "first", os.getpid(), "router")
    scene.hear(presence(FAR, "far", "decode", 5))
    await scene.until(FAR, "far", 5, "decode")
    scene.hear(presence(FAR, "far", "prefill", 5))
    await scene.until(FAR, "far", 5, "prefill")
    scene.hear(presence(HERE, "second", "router", os.getppid()))
    await scene.until(HERE, "second", os.getppid(), "router")
    running.cancel()


async def test_silence_takes_nothing_out_and_who_speaks_again_is_the_same(scene: Scene) -> None:
    process = presence(HERE, "lease", "router", os.getpid())
    scene.hear(process)
    await scene.registration.write()
    for change in scene.view.expire(1e9):
        scene.registration.on_change(change)
    await scene.registration.write()
    assert scene.told(HERE) == ("lease", os.getpid(), "router")
    scene.hear(process)
    await scene.registration.write()
    assert scene.told(HERE) == ("lease", os.getpid(), "router")


async def test_load_alone_writes_nothing(scene: Scene) -> None:
    process = presence(HERE, "lease", "router", os.getpid())
    scene.hear(process)
    await scene.registration.write()
    before = scene.paths.statefile.stat()
    scene.registration.on_change(Change(Happened.UPDATED, msgspec.structs.replace(process, detail="busy")))
    await scene.registration.write()
    after = scene.paths.statefile.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_what_cannot_be_written_is_reported_once_and_written_later(scene: Scene) -> None:
    scene.hear(presence(HERE, "lease", "router", os.getpid()))
    lock = FileLock(scene.paths.update_lock)
    lock.acquire(1.0)
    await scene.registration.write()
    await scene.registration.write()
    assert len(scene.report.lines) == 1
    assert "cannot be written down" in scene.report.lines[0]
    assert scene.told(HERE)[0] is None
    lock.release(remove=False)
    await scene.registration.write()
    assert scene.told(HERE)[0] == "lease"
    assert len(scene.report.lines) == 1


async def test_after_the_server_nothing_is_written(scene: Scene) -> None:
    scene.hear(presence(HERE, "lease", "router", os.getpid()))
    scene.store.remove()
    await scene.registration.write()
    assert not scene.paths.statefile.exists()


async def test_a_lease_that_was_cleared_does_not_come_back_while_its_process_is_still_heard(scene: Scene) -> None:
    scene.store.update(lambda state: restart(with_process(state, HERE, "dead", 2**22 - 1), HERE))
    scene.hear(presence(HERE, "dead", "router", 2**22 - 1))
    scene.store.update(lambda state: clear_lease(state, HERE, "dead"))
    await scene.registration.write()
    assert scene.told(HERE) == (None, None, "router")


def test_a_process_is_told_of_until_it_ends_and_only_on_its_own_machine(scene: Scene) -> None:
    def lease(pid: int, machine: str = machine_id()) -> str | None:
        scene.hear(msgspec.structs.replace(presence(HERE, f"lease-{pid}-{machine}", pid=pid), machine=machine))
        return scene.registration.with_heard(both()).components[HERE].lease

    assert lease(os.getpid(), "another one") is None
    assert lease(os.getpid()) is not None
    gone = forked(lambda: None)
    os.waitid(os.P_PID, gone, os.WEXITED | os.WNOWAIT)
    assert lease(gone) is None
    os.waitpid(gone, 0)
    assert lease(gone) is None


async def test_a_stranger_with_the_pid_of_a_process_that_ended_is_not_taken_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {77: 1000}
    monkeypatch.setattr(module, "start_time", started.get)
    monkeypatch.setattr(module, "alive", lambda pid, at: started.get(pid) == at)
    scene.hear(presence(HERE, "lease", "router", 77))
    await scene.registration.write()
    scene.store.update(lambda state: clear_lease(state, HERE, "lease"))
    started[77] = 2000
    await scene.registration.write()
    assert scene.told(HERE) == (None, None, "router")


async def test_a_role_that_was_ordered_meanwhile_is_not_undone(scene: Scene) -> None:
    process = presence(HERE, "lease", "decode", os.getpid())
    scene.hear(process)
    await scene.registration.write()
    lock = FileLock(scene.paths.update_lock)
    lock.acquire(1.0)
    scene.store = StateStore(scene.paths)
    registration = Registration(scene.store, scene.view.members, scene.report)
    for member in scene.view.members():
        registration.on_change(Change(Happened.APPEARED, member))
    writing = asyncio.create_task(registration.write())
    await asyncio.sleep(0)
    scene.hear(msgspec.structs.replace(process, role="prefill"))
    lock.release(remove=False)
    await writing
    assert scene.told(HERE) == ("lease", os.getpid(), "prefill")


def test_what_was_damaged_and_is_written_anew_has_its_leases_again(scene: Scene) -> None:
    scene.hear(presence(HERE, "lease", "router", os.getpid()))
    scene.store.read()
    scene.paths.statefile.write_text("{")
    scene.store.heal()
    asyncio.run(scene.registration.write())
    assert scene.told(HERE) == ("lease", os.getpid(), "router")


NEAR, ELSEWHERE = "dynamo_VllmWorker", "dynamo_PrefillWorker"
NAMES = st.sampled_from([NEAR, ELSEWHERE])
NODES = {ELSEWHERE: "far"}


class Lives(RuleBasedStateMachine):
    """Entries go through their phases, processes come and end, presences arrive late, again or never, and what is
    written is of a moment before. Whoever changes an entry follows the order of the actuator: a claim precedes its
    process, and what is taken out is that of a process that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.state = disaggregated()
        for name in (NEAR, ELSEWHERE):
            self.state = release(self.state, name)
        self.view = FleetView()
        self.alive: dict[str, Presence] = {}
        """The living process of each watcher."""
        self.sent: list[Presence] = []
        """What was ever announced, the last first. Each may arrive at any time, and again."""
        self.members: list[Presence] = []
        """The presences at the beginning of the write that is under way."""
        self.leases = 0

    @rule(name=NAMES)
    def go_on(self, name: str) -> None:
        """The next step of an entry's life, until it has a process."""
        component = self.state.components[name]
        node = NODES.get(name)
        if not component.holds:
            self.state = reserve(self.state, name, role="decode", node=node)
        elif component.phase == "reserved":
            self.state = claim(self.state, name, role="decode", cmd="run", phase="starting", node=node)
        elif name not in self.alive:
            if component.lease is not None:
                # Whoever starts another process has taken the old one out.
                self.state = clear_lease(self.state, name, component.lease)
            self.leases += 1
            self.announce(presence(name, f"lease {self.leases}", component.role, 1000 + self.leases))

    def announce(self, process: Presence) -> None:
        self.alive[process.watcher] = process
        self.sent.insert(0, process)

    @precondition(lambda self: self.alive)
    @rule(name=NAMES, change=st.sampled_from([settle, retire, restart]))
    def change(self, name: str, change: Callable[[State, Watcher | str], State]) -> None:
        allowed: dict[Callable[..., State], tuple[str | None, ...]]
        allowed = {settle: ("starting", "restarting"), retire: ("starting", "restarting", None), restart: (None,)}
        if name in self.alive and self.state.components[name].phase in allowed[change]:
            self.state = change(self.state, name)

    @precondition(lambda self: self.alive)
    @rule(name=NAMES, role=st.sampled_from(["decode", "prefill"]))
    def turn(self, name: str, role: str) -> None:
        if name in self.alive:
            self.announce(msgspec.structs.replace(self.alive[name], role=role))
            if self.state.components[name].lease == self.alive[name].lease:
                # The server does that before it answers the order.
                self.state = set_role(self.state, name, self.alive[name].lease, role)

    @precondition(lambda self: self.alive)
    @rule(name=NAMES, then=st.sampled_from(["nothing", "release", "unclaim", "clear"]))
    def die(self, name: str, then: str) -> None:
        if self.alive.pop(name, None) is None:
            return
        lease = self.state.components[name].lease
        if then == "release":
            self.state = release(self.state, name)
        elif then == "unclaim":
            self.state = unclaim(self.state, name)
        elif then == "clear" and lease is not None:
            self.state = clear_lease(self.state, name, lease)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self.view.observe(data.draw(st.sampled_from(self.sent)), 0.0)

    @rule()
    def forget_the_silent(self) -> None:
        self.view.expire(1e9)

    @rule()
    def begin_to_write(self) -> None:
        self.members = self.view.members()

    @rule()
    def write(self) -> None:
        before = self.state
        self.state = heard(before, self.members, self.lives)
        was, now = before.components[NEAR], self.state.components[NEAR]
        if now != was:
            assert (now.lease, now.pid) == (self.alive[NEAR].lease, self.alive[NEAR].pid)
        assert (now.phase, now.devices, now.node) == (was.phase, was.devices, was.node)
        assert heard(self.state, self.members, self.lives) is self.state

    @rule()
    def hear_all_and_write(self) -> None:
        for process in self.alive.values():
            self.view.observe(process, 0.0)
        self.begin_to_write()
        self.write()
        for name, process in self.alive.items():
            if self.view.get(process.lease) is not None:
                assert told(self.state.components[name]) == (process.lease, process.pid, process.role)

    def lives(self, process: Presence) -> bool:
        living = self.alive.get(process.watcher)
        return living is not None and living.lease == process.lease

    @invariant()
    def who_is_only_reserved_or_a_template_has_no_process(self) -> None:
        for component in self.state.components.values():
            if not component.holds or component.phase == "reserved":
                assert (component.lease, component.pid) == (None, None)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=200, stateful_step_count=30)
