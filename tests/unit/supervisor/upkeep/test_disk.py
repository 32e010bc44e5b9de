"""A disk that becomes full while the server runs."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from dynamo_local.supervisor.server.reports.logs import MAX_BYTES
from dynamo_local.supervisor.upkeep.disk import FULL_BELOW_BYTES, ROOM_ABOVE_BYTES, DiskUpkeep
from state.paths import StatePaths
from tests.unit.supervisor.recording import RecordingReport


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
