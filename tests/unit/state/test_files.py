from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.core.errors import StateError
from state.files import (
    Disk,
    make_private_directory,
    make_run_directory,
    make_sockets,
    remove_run_directory,
    replace_file,
)
from state.paths import Sockets, StatePaths


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def deep(tmp_path: Path) -> StatePaths:
    """A state root too deep for a socket."""
    return StatePaths(tmp_path / ("d" * 100), "dynamo")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="dyn") as directory:
        yield Path(directory)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_do_not_depend_on_the_umask(paths: StatePaths) -> None:
    before = os.umask(0)
    try:
        make_run_directory(paths)
        replace_file(paths.graph_file, b"{}")
    finally:
        os.umask(before)
    assert mode(paths.root) == mode(paths.run_dir) == mode(paths.logs_dir) == 0o700
    assert mode(paths.graph_file) == 0o600


def test_replacing_narrows_the_mode_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o666)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_does_not_write_through_a_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "file.tmp").symlink_to(victim)
    replace_file(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"precious"


class PlantingDisk(Disk):
    """A disk on which an attacker puts a link in place of the temporary file just before it is opened."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def create(self, path: Path) -> int:
        path.symlink_to(self.victim)
        return super().create(path)


def test_a_link_planted_in_the_last_moment_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    with pytest.raises(StateError, match="File exists"):
        replace_file(tmp_path / "file", b"new", PlantingDisk(victim))
    assert victim.read_bytes() == b"precious"


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StateError, match="others can write"):
        make_private_directory(shared)


def test_a_directory_that_others_can_list_is_closed_to_them(tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.mkdir()
    listed.chmod(0o755)
    assert make_private_directory(listed) == listed
    assert mode(listed) == 0o700


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(StateError, match="not a directory"):
        make_private_directory(tmp_path / "state")


def test_system_errors_name_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"nowhere/file: No such file or directory"):
        replace_file(tmp_path / "nowhere" / "file", b"")


def test_a_run_directory_with_remains_is_refused(paths: StatePaths) -> None:
    make_run_directory(paths)
    paths.bus_file.touch()
    with pytest.raises(StateError, match="is not empty"):
        make_run_directory(paths)


def test_removing_the_run_directory(paths: StatePaths) -> None:
    assert not remove_run_directory(paths)
    make_run_directory(paths)
    replace_file(paths.graph_file, b"{}")
    assert remove_run_directory(paths)
    assert not paths.run_dir.exists()
    assert paths.logs_dir.exists()


def test_a_link_in_place_of_the_run_directory_is_not_followed(paths: StatePaths, tmp_path: Path) -> None:
    make_private_directory(paths.root)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    paths.run_dir.symlink_to(tmp_path / "victim")
    assert remove_run_directory(paths)
    assert (tmp_path / "victim" / "file").exists()


def test_sockets_lie_in_the_run_directory_when_they_fit() -> None:
    paths = StatePaths(Path("/s"), "dynamo")
    assert make_sockets(paths) == Sockets(paths.run_dir)


def test_long_paths_move_the_sockets_to_a_private_directory(deep: StatePaths, temporary: Path) -> None:
    make_run_directory(deep)
    sockets = make_sockets(deep, temporary)
    assert sockets.fit
    assert sockets.directory.parent == temporary
    assert mode(sockets.directory) == 0o700
    sockets.circus.touch()
    assert remove_run_directory(deep)
    assert list(temporary.iterdir()) == []
    assert not remove_run_directory(deep)


def test_a_crash_before_there_are_sockets_leaves_none(deep: StatePaths, temporary: Path) -> None:
    make_run_directory(deep)
    sockets = make_sockets(deep, temporary)
    sockets.directory.rmdir()
    assert remove_run_directory(deep)
    assert not deep.run_dir.exists()


def test_two_servers_do_not_share_sockets(deep: StatePaths, temporary: Path) -> None:
    other = StatePaths(deep.root.with_name("e" * 100), deep.namespace)
    make_run_directory(deep)
    make_run_directory(other)
    assert make_sockets(deep, temporary) != make_sockets(other, temporary)


@pytest.mark.parametrize("name", ["other", "dynamo-another-x", "dynamo-dynamo-x/inner"])
def test_only_a_directory_made_for_sockets_is_removed(temporary: Path, deep: StatePaths, name: str) -> None:
    directory = temporary / name
    directory.mkdir(parents=True)
    make_run_directory(deep)
    deep.sockets_link.symlink_to(directory)
    assert remove_run_directory(deep)
    assert directory.exists()


def test_a_link_to_a_directory_is_not_removed(temporary: Path, deep: StatePaths, tmp_path: Path) -> None:
    (temporary / "dynamo-dynamo-x").symlink_to(tmp_path)
    make_run_directory(deep)
    deep.sockets_link.symlink_to(temporary / "dynamo-dynamo-x")
    remove_run_directory(deep)
    assert tmp_path.exists()
    assert (temporary / "dynamo-dynamo-x").is_symlink()


def test_where_no_socket_fits_the_remedy_is_told(deep: StatePaths, tmp_path: Path) -> None:
    long = make_private_directory(tmp_path / ("t" * 100))
    with pytest.raises(StateError, match="too long for a unix socket; set DYN_LOCAL_STATE_DIR"):
        make_sockets(deep, long)
    assert list(long.iterdir()) == []
