"""Repair of a server's files, without processes."""

from __future__ import annotations

import errno
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.control.errors import why_absent
from dynamo_local.core.errors import NamespaceBusyError
from dynamo_local.supervisor.server.reports.logs import MAX_BYTES
from dynamo_local.supervisor.upkeep.files import FULL_BELOW_BYTES, ROOM_ABOVE_BYTES, DiskUpkeep, ServerFiles
from state.files import make_run_directory, make_sockets, sockets_of
from state.locks import ServerLock, server_pid
from state.paths import Sockets, StatePaths
from state.record import ServerPhase, ServerRecord, write_record
from state.statefile.store import StateStore
from tests.unit.state.builders import disaggregated, with_process
from tests.unit.supervisor.recording import RecordingReport


class Case:
    """The files of a server, and their repair."""

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
        self.state = with_process(disaggregated(), "dynamo_VllmWorker", "old", 11)
        self.store = StateStore(self.paths)
        self.store.create(self.state)
        self.report = RecordingReport()
        self.files = ServerFiles(self.store, self.sockets, self.lock, self.report)
        self.files.repair()

    def complete(self) -> bool:
        files = (self.paths.graph_file, self.paths.bus_file, self.paths.blueprint_file)
        return all(path.read_text() == path.name and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    """A server whose state has a long path, so that its sockets lie elsewhere."""
    with tempfile.TemporaryDirectory(prefix="dyn") as temporary:
        case = Case(tmp_path / ("deep" * 20) / "state", Path(temporary))
        yield case
        case.lock.release()


def test_nothing_is_written_or_said_while_all_is_well(case: Case) -> None:
    before = {path: path.stat().st_mtime_ns for path in case.paths.root.rglob("*") if path.is_file()}
    case.files.repair()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert case.report.lines == []


def test_a_file_that_was_cut_or_damaged_is_written_anew(case: Case) -> None:
    graph = case.paths.graph_file
    whole = b'{"services": ["Frontend", "VllmWorker"]}'
    graph.write_bytes(whole)
    case.files.repair()
    for damage in (whole[:-9], b"", b'{"services": ["\xff"]}\0', b"[" * 100_000):
        graph.write_bytes(damage)
        case.files.repair()
        assert graph.read_bytes() == whole
    # What is written anew by its owner is taken over.
    graph.write_bytes(b"{}")
    case.files.repair()
    assert graph.read_bytes() == b"{}"


def test_what_is_removed_comes_back_and_is_reported_once(case: Case) -> None:
    shutil.rmtree(case.paths.root)
    for _ in range(2):
        case.files.repair()
    assert case.complete()
    assert StateStore(case.paths).read_file() == case.state
    assert stat.S_IMODE(case.paths.run_dir.stat().st_mode) == 0o700
    assert case.paths.logs_dir.is_dir()
    assert server_pid(case.paths) is not None
    assert sockets_of(case.paths) == case.sockets
    assert sum("was removed: its files are written anew" in line for line in case.report.lines) == 1
    assert sum("the statefile was damaged" in line for line in case.report.lines) == 1


def test_the_graph_of_each_revision_comes_back_until_the_revision_is_gone(case: Case) -> None:
    revisions = {"chat@1", "chat@2"}
    case.files.revisions = lambda: revisions
    graphs = [case.paths.graph_of(revision) for revision in sorted(revisions)]
    graphs[0].parent.mkdir(mode=0o700)
    for path in (*graphs, case.paths.board_file):
        path.write_text(path.name)
    case.files.repair()
    shutil.rmtree(case.paths.root)
    case.files.repair()
    assert [path.read_text() for path in (*graphs, case.paths.board_file)] == [
        "chat@1.json",
        "chat@2.json",
        "board.json",
    ]
    assert stat.S_IMODE(graphs[0].parent.stat().st_mode) == 0o700
    revisions.remove("chat@1")
    graphs[0].unlink()
    case.files.repair()
    assert [path.exists() for path in graphs] == [False, True]


def test_sockets_are_another_circusds_to_make(case: Case) -> None:
    compared: list[bool] = []
    case.files.on_healed = lambda: compared.append(case.sockets.circus.exists())
    case.sockets.circus.unlink()
    for _ in range(2):
        case.files.repair()
    assert len(case.report.lines) == 1
    assert "circusd's sockets were removed" in case.report.lines[0]
    case.paths.statefile.unlink()
    case.files.repair()
    case.sockets.circus.touch()
    for _ in range(2):
        case.files.repair()
    # What is written anew is compared with what runs, once, and not before circusd can be asked.
    assert compared == [True]


def test_starting_stopping_and_removed_are_told_apart(case: Case) -> None:
    case.paths.blueprint_file.unlink()
    expected: tuple[tuple[ServerPhase, str], ...] = (
        ("starting", "is only starting; `dynamo wait` waits"),
        ("running", "a file in .* was removed: the server goes on"),
        ("stopping", "is stopping; `dynamo ls` shows"),
    )
    for phase, why in expected:
        write_record(case.paths, ServerRecord(phase))
        assert re.search(why, str(why_absent(case.paths)))
    case.paths.record_file.write_text('{"phase": "running"}')
    assert "is of an earlier release" in str(why_absent(case.paths))
    write_record(case.paths, ServerRecord("running"))
    shutil.rmtree(case.paths.run_dir)
    assert f"{case.paths.run_dir} was removed" in str(why_absent(case.paths))
    case.paths.statefile.unlink()
    assert "is only starting" in str(why_absent(case.paths))


def test_a_server_that_another_one_has_replaced_ends(case: Case) -> None:
    shutil.rmtree(case.paths.root)
    with ServerLock(case.paths), pytest.raises(NamespaceBusyError, match="already runs"):
        case.files.repair()


def test_what_cannot_be_repaired_is_reported_once_and_tried_again(case: Case) -> None:
    case.paths.graph_file.unlink()
    case.paths.graph_file.with_name("graph.json.tmp").mkdir()
    for _ in range(2):
        case.files.repair()
    assert len(case.report.lines) == 1
    assert "cannot write" in case.report.lines[0]
    # The rest is seen to nevertheless.
    case.paths.statefile.unlink()
    case.files.repair()
    assert StateStore(case.paths).read_file() == case.state
    case.paths.graph_file.with_name("graph.json.tmp").rmdir()
    case.files.repair()
    assert case.complete()


def test_without_a_copy_it_is_as_it_was_read_last(case: Case) -> None:
    for path in (case.paths.statefile, case.paths.state_copy):
        path.write_text("{")
    case.files.repair()
    assert StateStore(case.paths).read_file() == case.state


def test_folders_of_dead_processes_go(case: Case) -> None:
    folder = Sockets(case.sockets.directory).process_folder(2**22 - 1)
    folder.mkdir()
    case.files.repair()
    assert not folder.exists()


# A disk that becomes full while the server runs.


def test_a_full_disk_and_the_room_after_it_are_each_said_once(tmp_path: Path) -> None:
    paths, report = StatePaths(tmp_path, "n"), RecordingReport()
    free = [ROOM_ABOVE_BYTES, 0, FULL_BELOW_BYTES - 1, ROOM_ABOVE_BYTES, ROOM_ABOVE_BYTES + 1, ROOM_ABOVE_BYTES + 1]
    disk = DiskUpkeep(paths, report, free=lambda folder: free.pop(0))
    while free:
        disk.look()
    assert [line.partition(":")[0] for line in report.lines] == [
        f"the disk of {tmp_path} is full",
        f"the disk of {tmp_path} has room again",
    ]


def test_a_log_that_cannot_be_rotated_is_said_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, report = StatePaths(tmp_path, "n"), RecordingReport()
    paths.logs_dir.mkdir()
    log, backup = paths.log_file("n_W"), paths.logs_dir / "n_W.log.1"
    with log.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    backup.write_text("earlier\n")

    def fails(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = DiskUpkeep(paths, report, free=lambda folder: None)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", fails)
        for _ in range(3):
            disk.look()
    assert report.lines == [f"cannot rotate {log}: No space left on device; check permissions and free space"]
    assert backup.read_text() == "earlier\n"
    assert {path.name for path in paths.logs_dir.iterdir()} == {"n_W.log", "n_W.log.1"}

    disk.look()
    assert log.stat().st_size == 0
    assert backup.stat().st_size == MAX_BYTES + 1
    assert backup.stat().st_mode & 0o777 == 0o600
