from __future__ import annotations

import json
import os
import signal
import stat
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_local.core.errors import NotRunningError, StateError
from state.files import Disk
from state.locks import Clock, FileLock, LockTimeoutError
from state.paths import StatePaths
from state.statefile.model import Owner, State
from state.statefile.store import StateStore
from state.statefile.transitions import claim, next_watcher, release, taken
from tests.unit.state.builders import disaggregated, empty_state, forked, in_child, python
from tests.unit.state.stepping_disk import SteppingDisk


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def store(paths: StatePaths) -> StateStore:
    return StateStore(paths)


def names(paths: StatePaths) -> set[str]:
    return {path.name for path in paths.root.iterdir()}


def log_level(state: State, level: str) -> State:
    return msgspec.structs.replace(state, environment={"DYN_LOG": level})


class TestLife:
    def test_create_read_update_remove(self, store: StateStore, paths: StatePaths) -> None:
        store.create(disaggregated())
        assert store.read() == disaggregated()
        after = store.update(lambda state: release(state, "dynamo_PrefillWorker"))
        assert after == release(disaggregated(), "dynamo_PrefillWorker") == store.read()
        store.remove()
        assert names(paths) == set()

    def test_what_has_not_changed_is_decoded_once(self, store: StateStore, paths: StatePaths) -> None:
        store.create(disaggregated())
        first = store.read()
        assert store.read() is first
        StateStore(paths).update(lambda state: log_level(state, "debug"))
        assert store.read() == log_level(first, "debug")
        store.remove()

    def test_file_and_directory_are_private(self, store: StateStore, paths: StatePaths) -> None:
        before = os.umask(0)
        try:
            store.create(disaggregated())
            store.update(lambda state: log_level(state, "debug"))
        finally:
            os.umask(before)
        assert stat.S_IMODE(paths.statefile.stat().st_mode) == 0o600
        assert stat.S_IMODE(paths.update_lock.stat().st_mode) == 0o600
        assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700

    def test_a_second_create_is_refused(self, store: StateStore) -> None:
        store.create(disaggregated())
        with pytest.raises(StateError, match="already exists"):
            store.create(empty_state())
        assert store.read() == disaggregated()

    def test_without_a_statefile_nothing_runs(self, store: StateStore, paths: StatePaths) -> None:
        for operation in (store.read, lambda: store.update(lambda state: state)):
            with pytest.raises(NotRunningError, match="no server runs in namespace dynamo"):
                operation()
        store.remove()
        assert not paths.root.exists()

    def test_an_update_that_raises_writes_nothing(self, store: StateStore, paths: StatePaths) -> None:
        store.create(disaggregated())
        before = paths.statefile.read_bytes()
        with pytest.raises(StateError, match="already claimed"):
            store.update(lambda state: claim(state, "dynamo_VllmWorker", role="", cmd=""))
        assert paths.statefile.read_bytes() == before
        store.update(lambda state: log_level(state, "debug"))

    def test_an_update_that_changes_nothing_does_not_write(self, store: StateStore, paths: StatePaths) -> None:
        store.create(disaggregated())
        before = paths.statefile.stat()
        store.update(lambda state: state)
        assert paths.statefile.stat().st_ino == before.st_ino

    def test_the_namespace_cannot_change(self, store: StateStore) -> None:
        with pytest.raises(StateError, match="namespace other"):
            store.create(empty_state("other"))
        store.create(empty_state())
        with pytest.raises(StateError, match="namespace other"):
            store.update(lambda _: empty_state("other"))

    def test_a_statefile_of_another_node_is_read_and_left_as_it_is(self, store: StateStore, paths: StatePaths) -> None:
        far = StateStore(paths, node="far")
        far.create(msgspec.structs.replace(disaggregated(), node="far"))
        before = paths.statefile.read_bytes()
        assert store.read().node == "far"
        for refused in (lambda: store.update(lambda state: log_level(state, "debug")), store.remove, store.check_own):
            with pytest.raises(StateError, match="written by node far, and this is node local"):
                refused()
        with pytest.raises(StateError, match="written by node local, and this is node far"):
            far.update(lambda _: disaggregated())
        assert paths.statefile.read_bytes() == before
        far.remove()

    def test_a_server_writes_no_state_of_the_one_that_has_taken_its_place(
        self, store: StateStore, paths: StatePaths
    ) -> None:
        store.create(disaggregated())
        StateStore(paths).remove()
        other = msgspec.structs.replace(disaggregated(), owner=Owner(1, 2))
        StateStore(paths).create(other)
        before = paths.statefile.read_bytes()
        with pytest.raises(StateError, match="that of the server with pid 1, not 4321; this server has been replaced"):
            store.update(lambda state: log_level(state, "debug"))
        with pytest.raises(StateError, match="that of the server with pid 4321, not 1"):
            StateStore(paths).update(lambda _: disaggregated())
        assert paths.statefile.read_bytes() == before
        assert store.read() == other


class TestUnreadable:
    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"schema_version": 5}'])
    def test_it_is_reported_with_a_remedy_and_kept(self, store: StateStore, paths: StatePaths, data: bytes) -> None:
        store.create(empty_state())
        paths.statefile.write_bytes(data)
        for operation in (store.read, lambda: store.update(lambda state: state)):
            with pytest.raises(StateError) as caught:
                operation()
            assert str(paths.statefile) in caught.value.cause
            assert caught.value.remedy
        assert paths.statefile.read_bytes() == data

    def test_another_version_says_what_to_do(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        document = json.loads(paths.statefile.read_bytes()) | {"schema_version": 7}
        paths.statefile.write_text(json.dumps(document))
        with pytest.raises(StateError, match=r"schema version 7.*use the dynamo-local version that wrote it"):
            store.read()

    def test_a_file_of_another_namespace_is_refused(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        paths.statefile.rename(paths.root / "other.json")
        with pytest.raises(StateError, match="is of namespace dynamo, not other"):
            StateStore(StatePaths(paths.root, "other")).read()

    def test_it_can_be_set_aside(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        paths.statefile.write_bytes(b"{")
        store.set_aside()
        assert names(paths) == {"dynamo.json.unreadable"}
        store.create(empty_state())

    def test_system_errors_become_ours(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        paths.statefile.unlink()
        paths.statefile.mkdir()
        with pytest.raises(StateError, match="Is a directory"):
            store.read()


class DyingDisk(SteppingDisk):
    """Writes a few bytes at a time and is killed when it comes to step number `last`."""

    at_once = 100

    def __init__(self, last: int) -> None:
        self.left = last

    def step(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


class NotingDisk(Disk):
    """Notes the steps in their order."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def create(self, path: Path) -> int:
        self.steps.append("create")
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> int:
        self.steps.append("write")
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.steps.append("sync")
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.steps.append("rename")
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self.steps.append("sync directory")
        super().sync_directory(directory)


class FullDisk(Disk):
    def __init__(self, step: str) -> None:
        self.failing = step

    def write(self, descriptor: int, data: bytes) -> int:
        self.fail("write")
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.fail("sync")
        super().sync(descriptor)

    def fail(self, step: str) -> None:
        if step == self.failing:
            raise OSError(28, "No space left on device")


class TestCrash:
    def test_data_is_on_disk_before_its_name_and_the_name_before_success(self, paths: StatePaths) -> None:
        """For power cuts, which no kill can show: only synced writes are kept for certain, others in any order."""
        disk = NotingDisk()
        StateStore(paths, disk=disk).create(empty_state())
        assert disk.steps == ["create", "write", "sync", "rename", "sync directory"]

    def test_a_kill_between_any_two_steps_leaves_the_old_or_the_new_file(
        self, store: StateStore, paths: StatePaths
    ) -> None:
        store.create(empty_state())
        kills, versions = 0, []
        for last in range(100):
            old, new = store.read(), log_level(empty_state(), str(last))
            dying = StateStore(paths, disk=DyingDisk(last))
            code = in_child(lambda dying=dying, new=new: dying.update(lambda _: new))  # type: ignore[misc]
            found = store.read()
            assert found in (old, new)
            versions.append(found == new)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
        # Old up to some step, new from there on; create, 3 writes or more, sync, rename, sync_directory.
        assert versions == sorted(versions)
        assert kills >= 7
        assert versions.count(True) == 2
        store.update(lambda state: log_level(state, "after"))
        assert names(paths) == {"dynamo.json", "dynamo.json.lock"}

    def test_a_kill_during_create_leaves_none_or_the_new_file(self, store: StateStore, paths: StatePaths) -> None:
        for last in range(100):
            dying = StateStore(paths, disk=DyingDisk(last))
            code = in_child(lambda dying=dying: dying.create(disaggregated()))  # type: ignore[misc]
            if paths.statefile.exists():
                assert store.read() == disaggregated()
            store.remove()
            assert names(paths) == set()
            if code == 0:
                break
        else:
            pytest.fail("every create was killed")

    @pytest.mark.parametrize("step", ["write", "sync"])
    def test_a_full_disk_leaves_the_old_file(self, store: StateStore, paths: StatePaths, step: str) -> None:
        store.create(disaggregated())
        full = StateStore(paths, disk=FullDisk(step))
        with pytest.raises(StateError, match="No space left on device"):
            full.update(lambda state: log_level(state, "debug"))
        assert store.read() == disaggregated()
        assert names(paths) == {"dynamo.json", "dynamo.json.lock"}


class TestConcurrency:
    @settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.lists(st.lists(st.sampled_from(["VllmWorker", "PrefillWorker"]), max_size=12), max_size=4))
    def test_updates_of_several_processes_lose_nothing(self, store: StateStore, work: list[list[str]]) -> None:
        """Processes claim workers at the same time; afterwards every claim is there and has a device of its own."""
        store.remove()
        store.create(empty_state())
        children = [forked(partial(claim_all, store, mine)) for mine in work]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert codes == [0] * len(work)
        state = store.read()
        for service in ("VllmWorker", "PrefillWorker"):
            wanted = sum(mine.count(service) for mine in work)
            assert sum(c.component == service for c in state.components.values()) == wanted
        assert taken(state) == set(range(sum(map(len, work))))

    def test_creating_and_removing_beside_each_other_loses_nothing(self, store: StateStore) -> None:
        """The lock file comes and goes with the statefile; between removals one creator succeeds."""
        children = [forked(lambda: create_and_remove(store)) for _ in range(3)]
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 3
        assert names(store.paths) == set()

    def test_readers_see_whole_versions(self, store: StateStore) -> None:
        store.create(empty_state())
        child = forked(lambda: rewrite(store, 60))
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            level = store.read().environment.get("DYN_LOG", "")
            assert level == level[:1] * len(level)


def claim_all(store: StateStore, services: list[str]) -> None:
    for service in services:
        store.update(lambda state, service=service: claim_one(state, service))  # type: ignore[misc]


def claim_one(state: State, service: str) -> State:
    watcher = next_watcher(state, service)
    return claim(state, watcher, role="worker", cmd="run", devices=[len(taken(state))])


def create_and_remove(store: StateStore) -> None:
    for _ in range(40):
        try:
            store.create(empty_state())
        except StateError:
            continue  # another was first
        # Nobody else removes it: it must still be there.
        assert store.read() == store.update(lambda state: state)
        store.remove()


def rewrite(store: StateStore, times: int) -> None:
    for number in range(times):
        store.update(lambda state, n=number: log_level(state, "ab"[n % 2] * (n * 50)))  # type: ignore[misc]


class TestLock:
    def test_the_holder_is_named_when_the_deadline_passes(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        ticks = iter(range(1000))
        slept: list[float] = []
        waiting = StateStore(paths, lock_timeout_s=10, clock=Clock(now=lambda: float(next(ticks)), sleep=slept.append))
        code = f"""
from pathlib import Path
from state.locks import FileLock
FileLock(Path({str(paths.update_lock)!r})).acquire(5)
print("ready", flush=True); input()
"""
        with (
            python(code) as holder,
            pytest.raises(LockTimeoutError, match=f"process {holder.pid} for more than 10 s") as caught,
        ):
            waiting.update(lambda state: log_level(state, "debug"))
        assert caught.value.holder == holder.pid
        assert len(slept) == 9
        # The holder was killed: the kernel freed its lock.
        assert store.update(lambda state: log_level(state, "debug")) == store.read()

    def test_updates_do_not_nest(self, store: StateStore, paths: StatePaths) -> None:
        store.create(empty_state())
        inner = StateStore(paths, lock_timeout_s=0)
        with pytest.raises(LockTimeoutError):
            store.update(lambda state: inner.update(lambda _: state))
        assert not FileLock(paths.update_lock).held
