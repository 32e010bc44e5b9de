"""The store of files: whole or not at all, whatever step a crash or a full disk comes at."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.core.errors import ItemAbsentError, StateError, StorageFullError
from dynamo_local.core.stored.files import FileLimits, StoredFile
from state.files import Disk, DiskError
from state.paths import StatePaths
from state.stored.files import FileDescription, FileStore
from tests.unit.state.stepping_disk import SteppingDisk

NOW = 1000.0
ALICE = FileDescription("alice", "in.jsonl", "batch", 3600)


class _Killed(BaseException):
    """The process ends here."""


@dataclass
class FailingDisk(SteppingDisk):
    """Raises `error` at one step, and at all later ones if it lasts."""

    at: int
    error: BaseException
    lasts: bool = False
    at_once: int = 40
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at or (self.lasts and self.steps > self.at):
            raise self.error


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "test")


def store_one(store: FileStore, content: bytes = b"content", described: FileDescription = ALICE) -> StoredFile:
    new = store.begin(described.owner)
    try:
        new.write(content)
        return store.keep(new, described, NOW)
    except StateError:
        new.drop()
        raise


def content_of(store: FileStore, file: StoredFile) -> bytes:
    with store.open(file) as content:
        return content.read()


def _close_below(folder: Path) -> None:
    """Close what is open there, as the kernel does for a process that was killed."""
    for each in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if each.readlink().is_relative_to(folder):
                os.close(int(each.name))


def parts(paths: StatePaths) -> list[Path]:
    return list((paths.files_dir / "parts").iterdir())


def test_a_file_outlives_its_store_and_is_its_owners_alone(paths: StatePaths) -> None:
    kept = store_one(FileStore(paths))
    assert (kept.bytes, kept.created_at, kept.expires_at) == (7, 1000, 4600)
    later = FileStore(paths)
    assert later.listed("alice", NOW) == [kept]
    assert content_of(later, later.find("alice", kept.id, NOW)) == b"content"
    assert later.listed("bob", NOW) == []
    for owner, file_id in (("bob", kept.id), ("alice", "file-" + "0" * 24), ("alice", "../" + kept.id)):
        with pytest.raises(ItemAbsentError):
            later.find(owner, file_id, NOW)
    with pytest.raises(ItemAbsentError):
        later.remove("bob", kept.id, NOW)
    later.remove("alice", kept.id, NOW)
    assert FileStore(paths).listed("alice", NOW) == []
    assert parts(paths) == []


def test_nobody_else_can_read_what_is_stored(paths: StatePaths) -> None:
    kept = store_one(FileStore(paths))
    folder = paths.files_dir
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, folder / kept.id, *(folder / kept.id).iterdir())}
    assert {path.name: mode for path, mode in modes.items()} == {
        folder.name: 0o700,
        kept.id: 0o700,
        "metadata.json": 0o600,
        "content": 0o600,
    }


@pytest.mark.parametrize("error", [_Killed(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_a_file_is_whole_or_not_there_whatever_step_fails(tmp_path: Path, error: BaseException) -> None:
    outcomes = set()
    for step in range(1, 40):
        paths = StatePaths(tmp_path / str(step), "test")
        before = store_one(FileStore(paths), b"before")
        disk = FailingDisk(step, error)
        try:
            store_one(FileStore(paths, disk=disk))
        except DiskError:
            outcomes.add("failed")
        except _Killed:
            outcomes.add("failed")
            _close_below(paths.files_dir)
        else:
            outcomes.add("kept")
        after = FileStore(paths)
        after.sweep(NOW)
        files = after.listed("alice", NOW)
        assert [content_of(after, file) for file in files if file.id != before.id] in ([], [b"content"])
        assert content_of(after, before) == b"before"
        assert parts(paths) == []
    assert outcomes == {"failed", "kept"}


def test_what_is_being_made_is_not_swept_by_another(paths: StatePaths) -> None:
    new = FileStore(paths).begin("alice")
    assert FileStore(paths).sweep(NOW) == 0
    new.write(b"late")
    kept = FileStore(paths).keep(new, ALICE, NOW)
    assert FileStore(paths).sweep(NOW) == 0
    assert kept.bytes == 4


def test_what_has_expired_is_gone_and_then_removed(paths: StatePaths) -> None:
    store = FileStore(paths)
    kept = store_one(store)
    with pytest.raises(ItemAbsentError):
        store.find("alice", kept.id, NOW + 3600)
    assert store.listed("alice", NOW + 3600) == []
    assert store.sweep(NOW + 3599) == 0
    assert FileStore(paths).sweep(NOW + 3600) == 1
    assert not (paths.files_dir / kept.id).exists()


def test_bounds_hold_for_each_owner_and_for_all(paths: StatePaths) -> None:
    store = FileStore(paths, FileLimits(max_files=2, max_stored_bytes=10, max_stored_bytes_in_all=12))
    store_one(store, b"12345")
    with pytest.raises(StorageFullError, match="max-stored-bytes"):
        store.begin("alice", 6)
    with pytest.raises(StorageFullError, match=r"would be 11, at most 10 \(setting max-stored-bytes\)"):
        store_one(store, b"123456")
    store_one(store, b"1")
    with pytest.raises(StorageFullError, match="max-files"):
        store_one(store, b"")
    bob = FileDescription("bob", "b", "batch", 3600)
    with pytest.raises(StorageFullError, match="max-stored-bytes-in-all"):
        store_one(store, b"1234567", bob)
    # Another process has the same bounds; what was refused has left nothing.
    assert len(FileStore(paths).listed("alice", NOW)) == 2
    assert parts(paths) == []


def test_content_is_lent_and_adopted_without_a_copy(paths: StatePaths) -> None:
    store = FileStore(paths)
    kept = store_one(store)
    lent = paths.root / "lent"
    store.lend(kept, lent)
    store.remove("alice", kept.id, NOW)
    assert lent.read_bytes() == b"content"
    file_id = "file-" + "a" * 24
    adopted = store.adopt(lent, file_id, ALICE, NOW)
    assert store.adopt(lent, file_id, ALICE, NOW + 5) == adopted
    assert content_of(store, adopted) == b"content"
    assert lent.stat().st_ino == (paths.files_dir / file_id / "content").stat().st_ino


def test_a_store_of_a_newer_release_is_refused_in_one_line(paths: StatePaths) -> None:
    kept = store_one(FileStore(paths))
    (paths.files_dir / "store.json").write_text('{"schema_version": 2}')
    for use in (lambda: FileStore(paths).begin("alice"), lambda: FileStore(paths).listed("alice", NOW)):
        with pytest.raises(StateError, match="has version 2; this release knows version 1") as refused:
            use()
        assert "\n" not in str(refused.value)
    (paths.files_dir / "store.json").write_text("nonsense")
    with pytest.raises(StateError, match="cannot be read"):
        FileStore(paths).begin("alice")
    assert (paths.files_dir / kept.id / "content").exists()


def test_looking_makes_nothing(paths: StatePaths) -> None:
    assert FileStore(paths).listed("alice", NOW) == []
    assert FileStore(paths).sweep(NOW) == 0
    assert not paths.files_dir.exists()
    assert isinstance(FileStore(paths)._folder.disk, Disk)
