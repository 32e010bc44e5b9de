"""Folders and shared memory of processes, live and dead ones."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from state.files import make_run_directory
from state.machine.processes import descendants, start_time, this_process
from state.paths import Sockets, StatePaths
from state.remains import (
    SHARED_MEMORY,
    clear_segments,
    has_segments,
    make_folder,
    reap,
    record_segments,
    remove_remains,
    segment_prefix,
    segments_of,
)
from state.statefile.model import Owner
from tests.unit.state.builders import python

LEASE = "0123456789abcdef"
GONE = Owner(2**22 - 1, 1)
"""No process has such a pid."""

_HOLDER = """
import sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
made = [shared_memory.SharedMemory(name, create=True, size=4096) for name in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[StatePaths]:
    paths = StatePaths(tmp_path / "state", "dynamo")
    make_run_directory(paths)
    yield paths
    for path in SHARED_MEMORY.glob(f"{segment_prefix(paths)}*"):
        path.unlink()


@pytest.fixture
def sockets(paths: StatePaths) -> Sockets:
    return Sockets(paths.run_dir)


def segment(name: str) -> Path:
    path = SHARED_MEMORY / name
    path.write_bytes(b"KV")
    return path


def holder(*names: str) -> str:
    return _HOLDER.replace("sys.argv[1:]", repr(list(names)))


def test_a_folder_is_private_and_stays_while_its_process_lives(paths: StatePaths, sockets: Sockets) -> None:
    folder = make_folder(sockets, this_process(), LEASE)
    mine = segment(f"{segment_prefix(paths, LEASE)}1")
    assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (sockets.directory, 0o700)
    reap(sockets)
    assert folder.exists()
    assert mine.exists()


def test_what_a_dead_process_has_left_goes_with_its_segments_and_nothing_else(
    paths: StatePaths, sockets: Sockets
) -> None:
    before = sorted(sockets.directory.iterdir())
    folder = make_folder(sockets, GONE, LEASE)
    (folder / "x.bell").symlink_to("/nowhere")
    (folder / "sub").mkdir()
    mine = segment(f"{segment_prefix(paths, LEASE)}1")
    others = segment(f"{segment_prefix(paths, 'fedcba9876543210')}1")
    reap(sockets)
    assert sorted(sockets.directory.iterdir()) == before
    assert not mine.exists()
    assert others.exists()


def test_a_pid_given_again_tells_no_lie(sockets: Sockets) -> None:
    me = this_process()
    folder = make_folder(sockets, Owner(me.pid, me.start_time + 1), LEASE)
    (folder / "old").touch()
    # The one who has it now makes its own.
    assert make_folder(sockets, me, LEASE) == folder
    assert not (folder / "old").exists()
    make_folder(sockets, Owner(me.pid, me.start_time + 1), LEASE)
    reap(sockets)
    assert not folder.exists()


def test_a_folder_that_is_only_being_made_is_left_alone(sockets: Sockets) -> None:
    sockets.process_folder(os.getpid()).mkdir()
    sockets.process_folder(GONE.pid).mkdir()
    reap(sockets)
    assert sockets.process_folder(os.getpid()).exists()
    assert not sockets.process_folder(GONE.pid).exists()


def test_shared_memory_in_use_is_left_until_it_is_not(paths: StatePaths, sockets: Sockets) -> None:
    folder = make_folder(sockets, GONE, LEASE)
    name = f"{segment_prefix(paths, LEASE)}1"
    with python(holder(name)) as child:
        assert segments_of(child.pid)
        reap(sockets)
        assert (SHARED_MEMORY / name).exists()
        assert folder.exists()
        assert clear_segments(paths, sockets, wait_s=0.0) == 0
    reap(sockets)
    assert not (SHARED_MEMORY / name).exists()
    assert not folder.exists()


def test_of_other_names_what_is_recorded_goes_if_it_is_still_the_same(paths: StatePaths, sockets: Sockets) -> None:
    names = [f"test-remains-{os.getpid()}-{place}" for place in range(2)]
    try:
        with python(holder(*names)) as child:
            started = start_time(child.pid)
            assert started is not None
            folder = make_folder(sockets, Owner(child.pid, started), LEASE)
            record_segments(folder, descendants(child.pid))
            reap(sockets)
            assert folder.exists()
        # The first name is somebody else's by now.
        first, second = (SHARED_MEMORY / name for name in names)
        first.rename(SHARED_MEMORY / f"{names[0]}-old")
        segment(names[0])
        reap(sockets)
        assert not folder.exists()
        assert first.exists()
        assert not second.exists()
    finally:
        for name in (*names, f"{names[0]}-old"):
            with suppress(FileNotFoundError):
                (SHARED_MEMORY / name).unlink()


def test_a_killed_process_leaves_shared_memory_of_which_the_name_is_known(paths: StatePaths, sockets: Sockets) -> None:
    """The resource tracker is killed as well, as happens to vLLM's."""
    prefix = segment_prefix(paths, LEASE)
    code = f"""
from multiprocessing import resource_tracker, shared_memory
from dynamo_local.engine.vllm.patches.forks import name_segments
name_segments({{"DYN_SHM_PREFIX": "{prefix}"}})
made = shared_memory.SharedMemory(create=True, size=4096)
print("ready", flush=True)
import time
time.sleep(600)
"""
    with python(code) as child:
        started = start_time(child.pid)
        assert started is not None
        make_folder(sockets, Owner(child.pid, started), LEASE)
        (tracker,) = descendants(child.pid) - {child.pid}
        found = segments_of(child.pid)
        assert all(one.name.startswith(prefix) for one in found)
        os.kill(tracker, signal.SIGKILL)
    assert has_segments(paths)
    reap(sockets)
    assert not has_segments(paths)


def test_a_directory_in_place_of_ours_is_not_believed(paths: StatePaths, sockets: Sockets, tmp_path: Path) -> None:
    name = f"test-remains-{os.getpid()}-x"
    kept = segment(name)
    try:
        folder = make_folder(sockets, GONE, LEASE)
        (folder / "segments.json").write_text(f'[{{"name":"{name}","inode":{kept.stat().st_ino}}}]')
        paths.run_dir.rename(tmp_path / "elsewhere")
        paths.run_dir.symlink_to(tmp_path / "elsewhere")
        reap(sockets)
        remove_remains(paths)
        assert kept.exists()
        assert folder.name in {path.name for path in (tmp_path / "elsewhere").iterdir()}
    finally:
        kept.unlink()


def test_a_server_without_processes_is_cleared_of_all(paths: StatePaths, sockets: Sockets) -> None:
    make_folder(sockets, this_process(), LEASE)
    left = [segment(f"{segment_prefix(paths, LEASE)}1"), segment(f"{segment_prefix(paths)}of-a-lost-folder")]
    other = segment(f"{segment_prefix(StatePaths(paths.root, 'other'))}1")
    try:
        assert remove_remains(paths) == (2, True)
        assert remove_remains(paths) == (0, False)
        assert not any(path.exists() for path in left)
        assert other.exists()
    finally:
        other.unlink()
