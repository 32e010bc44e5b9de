"""The folder of answers: one owner at a time, nothing half, nothing of others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dynamo_local.core.answers.records import Kind, record
from dynamo_local.core.errors import StateError
from state.answers.folder import AnswerFolder, Kept
from state.files import Disk, DiskError
from state.paths import StatePaths
from tests.unit.state.answers.disks import FullDisk

ONE, TWO = record(Kind.EVENT, b"1"), record(Kind.EVENT, b"2")


@pytest.fixture
def folder(tmp_path: Path) -> AnswerFolder:
    return AnswerFolder(StatePaths(tmp_path, "n"))


def contents(folder: AnswerFolder, owner: str, answer: str) -> list[bytes]:
    reader = folder.reader(owner, answer)
    assert reader is not None
    found = [each.content for each in reader.read() if each.kind is Kind.EVENT]
    reader.close()
    return found


def test_a_reader_follows_what_is_written_until_the_end(folder: AnswerFolder) -> None:
    journal = folder.create("o", "a", ONE)
    reader = folder.reader("o", "a")
    assert reader is not None
    assert [each.content for each in reader.read()] == [b"1", b""]
    before = reader.has_more
    journal.write(TWO)
    assert (before, reader.has_more) == (False, True)
    assert [each.content for each in reader.read()] == [b"2", b""]
    journal.end()
    assert folder.look().running == []
    assert contents(folder, "o", "a") == [b"1", b"2"]
    assert folder.remove("o", "a")
    assert reader.is_removed
    assert not folder.remove("o", "a")
    assert folder.reader("o", "a") is None
    reader.close()


def test_others_see_and_take_nothing(folder: AnswerFolder) -> None:
    folder.create("o", "a", ONE).end()
    assert folder.reader("other", "a") is None
    assert not folder.remove("other", "a")
    assert folder.kept("other") == Kept(0, 0)
    assert folder.kept("o").answers == 1
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.path.rglob("*.ended")} == {0o600}


def test_an_answer_has_one_frontend_and_another_takes_it_when_that_is_gone(folder: AnswerFolder) -> None:
    journal = folder.create("o", "a", ONE)
    assert folder.take("o", "a") is None
    with journal.path.open("ab") as file:
        # As a frontend that was killed in the middle of a record.
        file.write(TWO + TWO[:5])
    journal.close()
    taken = folder.take("o", "a")
    assert taken is not None
    assert folder.take("o", "a") is None
    # What was written is kept, and what was written in part is not.
    taken.write(ONE)
    assert contents(folder, "o", "a") == [b"1", b"2", b"1"]
    taken.end()
    assert folder.take("o", "a") is None
    assert folder.look().running == []


def test_a_disk_that_is_full_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    disk = FullDisk()
    folder = AnswerFolder(StatePaths(tmp_path, "n"), disk)
    journal = folder.create("o", "a", ONE)
    disk.is_full = True
    with pytest.raises(DiskError, match="No space left"):
        journal.write(TWO)
    with pytest.raises(DiskError, match="No space left"):
        folder.create("o", "b", ONE)
    assert contents(folder, "o", "a") == [b"1"]
    assert folder.reader("o", "b") is None
    disk.is_full = False
    journal.write(TWO)
    assert contents(folder, "o", "a") == [b"1", b"2"]
    journal.close()


def test_what_expires_goes_and_what_runs_stays(folder: AnswerFolder) -> None:
    running = folder.create("o", "running", ONE)
    folder.create("o", "ended", ONE).end()
    now = time.time()
    assert folder.remove_expired(now, 100.0) == 0
    assert folder.remove_expired(now + 101.0, 100.0) == 1
    assert folder.reader("o", "ended") is None
    assert folder.look().running == [("o", "running")]
    running.close()


def test_a_cancellation_is_for_whoever_computes_the_answer(folder: AnswerFolder) -> None:
    journal = folder.create("o", "a", ONE)
    folder.ask_to_cancel("o", "a")
    assert folder.look().cancelled == {"a"}
    journal.end()
    assert folder.look().cancelled == set()


def test_the_folder_of_a_later_release_is_refused(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "n")
    folder = AnswerFolder(paths)
    folder.create("o", "a", ONE).close()
    (folder.path / "store.json").write_text('{"schema_version": 2}')
    with pytest.raises(StateError, match="version 2; this release knows version 1"):
        AnswerFolder(paths).check()


def test_looking_makes_no_folder(folder: AnswerFolder) -> None:
    folder.check()
    assert folder.look().running == []
    assert folder.remove_expired(time.time(), 0.0) == 0
    assert folder.reader("o", "a") is None
    assert folder.kept("o") == Kept(0, 0)
    assert not folder.path.exists()


def test_each_look_finds_what_has_changed_since_the_last(folder: AnswerFolder) -> None:
    folder.create("o", "ended", ONE).end()
    running = folder.create("o", "running", ONE)
    for _ in range(3):
        assert folder.look() == ([("o", "running")], set())
    folder.ask_to_cancel("o", "running")
    other = folder.create("", "other", ONE)
    for _ in range(3):
        found = folder.look()
        assert (sorted(found.running), found.cancelled) == ([("", "other"), ("o", "running")], {"running"})
    running.end()
    for _ in range(3):
        assert folder.look() == ([("", "other")], set())
    other.close()


def test_an_answer_that_was_created_is_on_the_disk_with_every_folder_above_it(tmp_path: Path) -> None:
    class Noting(Disk):
        def __init__(self) -> None:
            self.directories: set[Path] = set()

        def sync_directory(self, directory: Path) -> None:
            self.directories.add(directory)
            super().sync_directory(directory)

    disk = Noting()
    folder = AnswerFolder(StatePaths(tmp_path, "n"), disk)
    folder.create("o", "a", ONE)
    assert disk.directories >= {tmp_path, folder.path, folder.path / "of-o"}


def test_what_was_written_last_is_shown_although_its_writer_died_before_the_mark(folder: AnswerFolder) -> None:
    journal = folder.create("o", "a", ONE)
    journal.write(TWO)
    journal.close()
    path = next(folder.path.rglob("*.running"))
    path.write_bytes(path.read_bytes()[: -len(record(Kind.SYNCED))])
    assert contents(folder, "o", "a") == [b"1"]
    taken = folder.take("o", "a")
    assert taken is not None
    assert [each.content for each in taken.read() if each.kind is Kind.EVENT] == [b"1", b"2"]
    # It has all there is to be computed, and writes no more.
    taken.end()
    assert contents(folder, "o", "a") == [b"1", b"2"]
