"""What a server does for its files, on a disk of its own and without processes."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.core.errors import NamespaceBusyError, SupervisorError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.server.blueprint import check_reachable, why_absent
from dynamo_local.supervisor.upkeep.files import ServerFiles, as_heard
from state.files import make_run_directory, make_sockets, sockets_of
from state.locks import ServerLock, server_pid
from state.model import State
from state.paths import Sockets, StatePaths
from state.store import StateStore
from state.transitions import claim, set_lease
from tests.unit.state.builders import disaggregated, empty_state
from tests.unit.supervisor.recording import RecordingReport


class Kept:
    """A server's files, and what looks after them."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self.paths = StatePaths(root, "dynamo")
        self.lock = ServerLock(self.paths)
        self.lock.acquire()
        make_run_directory(self.paths)
        self.sockets = make_sockets(self.paths, temporary)
        self.sockets.circus.touch()
        for path in (self.paths.graph_file, self.paths.bus_file, self.paths.blueprint_file):
            path.write_text(path.name)
            path.chmod(0o600)
        self.state = set_lease(disaggregated(), "dynamo_VllmWorker", "old", 11)
        StateStore(self.paths).create(self.state)
        self.report = RecordingReport()
        self.upkeep = ServerFiles(self.paths, self.sockets, self.lock, self.report)
        self.upkeep.look()

    def complete(self) -> bool:
        files = (self.paths.graph_file, self.paths.bus_file, self.paths.blueprint_file)
        return all(path.read_text() == path.name and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """Its sockets lie elsewhere if the path of its state is long."""
    with tempfile.TemporaryDirectory(prefix="dyn") as temporary:
        kept = Kept(tmp_path / ("deep" * 20) / "state", Path(temporary))
        yield kept
        kept.lock.release()


def presence(watcher: str, lease: str, pid: int, role: str) -> Presence:
    return Presence(watcher, "VllmWorker", role, lease, pid, "ready")


def test_nothing_is_written_or_said_while_all_is_well(kept: Kept) -> None:
    before = {path: path.stat().st_mtime_ns for path in kept.paths.root.rglob("*") if path.is_file()}
    kept.upkeep.look()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert kept.report.lines == []


def test_what_is_removed_comes_back_and_is_told_once(kept: Kept) -> None:
    shutil.rmtree(kept.paths.root)
    for _ in range(2):
        kept.upkeep.look()
    assert kept.complete()
    assert StateStore(kept.paths).read_file() == kept.state
    assert stat.S_IMODE(kept.paths.run_dir.stat().st_mode) == 0o700
    assert kept.paths.logs_dir.is_dir()
    assert server_pid(kept.paths) is not None
    assert sockets_of(kept.paths) == kept.sockets
    assert sum("was removed: what is known of it is written anew" in line for line in kept.report.lines) == 1
    assert sum("the statefile was damaged" in line for line in kept.report.lines) == 1


def test_sockets_are_another_circusds_to_make_which_commands_tell(kept: Kept) -> None:
    check_reachable(kept.paths, with_endpoint(kept))
    compared: list[bool] = []
    kept.upkeep.on_healed = lambda: compared.append(kept.sockets.circus.exists())
    kept.sockets.circus.unlink()
    for _ in range(2):
        kept.upkeep.look()
    assert len(kept.report.lines) == 1
    assert "circusd's sockets were removed" in kept.report.lines[0]
    with pytest.raises(SupervisorError, match=r"was removed.*try again in a moment"):
        check_reachable(kept.paths, with_endpoint(kept))
    kept.paths.statefile.unlink()
    kept.upkeep.look()
    kept.sockets.circus.touch()
    for _ in range(2):
        kept.upkeep.look()
    # What is written anew is compared with what runs, once, and not before circusd can be asked.
    assert compared == [True]


def with_endpoint(kept: Kept) -> State:
    return empty_state(endpoint=kept.sockets.circus_endpoint)


def test_starting_and_removed_are_told_apart(kept: Kept) -> None:
    kept.paths.blueprint_file.unlink()
    assert "only starting, or ending" in str(why_absent(kept.paths))
    shutil.rmtree(kept.paths.run_dir)
    assert "was removed" in str(why_absent(kept.paths))


def test_a_server_that_another_one_has_replaced_ends(kept: Kept) -> None:
    shutil.rmtree(kept.paths.root)
    with ServerLock(kept.paths), pytest.raises(NamespaceBusyError, match="already runs"):
        kept.upkeep.look()


def test_what_cannot_be_mended_is_told_once_and_tried_again(kept: Kept) -> None:
    kept.paths.graph_file.unlink()
    kept.paths.graph_file.with_name("graph.json.tmp").mkdir()
    for _ in range(2):
        kept.upkeep.look()
    assert len(kept.report.lines) == 1
    assert "cannot write" in kept.report.lines[0]
    # The rest is seen to nevertheless.
    kept.paths.statefile.unlink()
    kept.upkeep.look()
    assert StateStore(kept.paths).read_file() == kept.state
    kept.paths.graph_file.with_name("graph.json.tmp").rmdir()
    kept.upkeep.look()
    assert kept.complete()


def test_without_a_copy_leases_are_those_that_are_heard(kept: Kept) -> None:
    kept.upkeep.members = lambda: [presence("dynamo_VllmWorker", "new", 22, "prefill")]
    for path in (kept.paths.statefile, kept.paths.state_copy):
        path.write_text("{")
    kept.upkeep.look()
    component = StateStore(kept.paths).read_file().components["dynamo_VllmWorker"]
    assert (component.lease, component.pid, component.role) == ("new", 22, "prefill")


def test_who_has_no_claim_is_not_heard() -> None:
    state = claim(empty_state(), "dynamo_VllmWorker", role="decode", cmd="run")
    strangers = [presence("dynamo_VllmWorker_1", "x", 1, "decode"), presence("other_VllmWorker", "y", 2, "decode")]
    assert as_heard(state, strangers) == state


def test_folders_of_dead_processes_go(kept: Kept) -> None:
    folder = Sockets(kept.sockets.directory).process_folder(2**22 - 1)
    folder.mkdir()
    kept.upkeep.look()
    assert not folder.exists()
