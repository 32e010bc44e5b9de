"""The servers of a state root, as their files tell them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from state.files import DiskError, make_run_directory
from state.locks import ServerLock
from state.machine.processes import this_process
from state.namespaces import find_servers, is_running, with_logs
from state.paths import StatePaths
from state.statefile.model import Owner
from state.statefile.store import StateStore
from tests.unit.state.builders import empty_state


def write_state(root: Path, namespace: str, owner: Owner) -> StatePaths:
    paths = StatePaths(root, namespace)
    StateStore(paths).create(msgspec.structs.replace(empty_state(namespace), owner=owner))
    return paths


def test_where_there_is_no_folder_no_server_runs(tmp_path: Path) -> None:
    found = find_servers(tmp_path / "none")
    assert (found.running, found.crashed, with_logs(tmp_path / "none")) == ((), (), ())


def test_servers_that_run_are_told_from_crashed_and_ended_ones(tmp_path: Path) -> None:
    for namespace in ("b", "a"):
        write_state(tmp_path, namespace, Owner(1, 1))
    make_run_directory(StatePaths(tmp_path, "starts-only"))
    StatePaths(tmp_path, "damaged").statefile.write_text("{")
    for ended in ("ended", "ended-2"):
        StatePaths(tmp_path, ended).logs_dir.mkdir()
    # A lock file that was left alone holds nothing; files of other names are none of ours.
    (tmp_path / "stale.lock").touch()
    for other in ("a.json.tmp", "a.json.unreadable", "no_namespace.json", "README"):
        (tmp_path / other).touch()
    with ServerLock(StatePaths(tmp_path, "b")), ServerLock(StatePaths(tmp_path, "just-started")):
        found = find_servers(tmp_path)
    assert found.running == ("b", "just-started")
    assert found.crashed == ("a", "damaged", "starts-only")
    assert with_logs(tmp_path) == ("ended", "ended-2", "starts-only")


def test_a_server_whose_lock_file_was_removed_still_runs(tmp_path: Path) -> None:
    paths = write_state(tmp_path, "n", this_process())
    assert is_running(paths)
    assert find_servers(tmp_path).running == ("n",)


def test_a_folder_that_cannot_be_listed_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"cannot list .*Not a directory"):
        find_servers(tmp_path / "file")
