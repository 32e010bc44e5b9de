from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dynamo_local.core.errors import NamespaceBusyError, StateError
from state.locks import Clock, FileLock, LockTimeoutError, ServerLock, server_pid
from state.paths import StatePaths
from tests.unit.state.builders import python


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


HOLD = """
from pathlib import Path
from state.locks import ServerLock
from state.paths import StatePaths
ServerLock(StatePaths(Path({root!r}), "dynamo")).acquire()
{then}
print("ready", flush=True); input()
"""


def holder(paths: StatePaths, then: str = "") -> str:
    return HOLD.format(root=str(paths.root), then=then)


def test_a_second_server_is_told_who_runs(paths: StatePaths) -> None:
    with python(holder(paths)) as first:
        with pytest.raises(NamespaceBusyError, match=f"already runs in namespace dynamo .pid {first.pid}."):
            ServerLock(paths).acquire()
        assert server_pid(paths) == first.pid
    assert server_pid(paths) is None


def test_another_namespace_is_free(paths: StatePaths) -> None:
    with ServerLock(paths), ServerLock(StatePaths(paths.root, "other")):
        assert server_pid(paths) == os.getpid()


def test_a_killed_server_frees_the_namespace(paths: StatePaths) -> None:
    with python(holder(paths)):
        pass
    assert paths.server_lock.exists()
    assert server_pid(paths) is None
    with ServerLock(paths) as lock:
        assert lock.held
        assert server_pid(paths) == os.getpid()


def test_what_a_server_started_does_not_hold_its_lock(paths: StatePaths) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid, flush=True)"
    code = holder(paths, child).replace('print("ready", flush=True); ', "")
    with python("print('ready', flush=True)\n" + code) as server:
        assert server.stdout is not None
        orphan = int(server.stdout.readline())
        assert server_pid(paths) == server.pid
    try:
        os.kill(orphan, 0)
        assert server_pid(paths) is None
    finally:
        os.kill(orphan, 9)


def test_release_leaves_no_file_and_can_be_repeated(paths: StatePaths) -> None:
    lock = ServerLock(paths)
    lock.acquire()
    assert stat.S_IMODE(paths.server_lock.stat().st_mode) == 0o600
    lock.release()
    lock.release()
    assert not lock.held
    assert list(paths.root.iterdir()) == []


def test_asking_who_runs_creates_nothing(paths: StatePaths) -> None:
    assert server_pid(paths) is None
    assert not paths.root.exists()


def test_a_lock_is_not_taken_twice(paths: StatePaths) -> None:
    with ServerLock(paths) as lock, pytest.raises(StateError, match="already locked by this object"):
        lock.acquire()


def test_a_release_leaves_the_lock_file_of_another_alone(tmp_path: Path) -> None:
    """The file of a held lock was deleted, and the next holder has made a new one."""
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire(0)
    first.path.unlink()
    second.acquire(0)
    first.release(remove=True)
    with pytest.raises(LockTimeoutError):
        FileLock(tmp_path / "lock").acquire(0)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StateError, match="cannot lock"):
        FileLock(tmp_path / "lock").acquire(0)
    assert (tmp_path / "victim").read_text() == "precious"


def test_no_two_hold_a_lock_whose_file_comes_and_goes(tmp_path: Path) -> None:
    inside: list[int] = []
    overlaps: list[int] = []
    impatient = Clock(sleep=lambda _: os.sched_yield())

    def work() -> None:
        for _ in range(400):
            lock = FileLock(tmp_path / "lock", impatient)
            lock.acquire(60)
            inside.append(1)
            os.sched_yield()
            if len(inside) != 1:
                overlaps.append(len(inside))
            inside.pop()
            lock.release(remove=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert list(tmp_path.iterdir()) == []
