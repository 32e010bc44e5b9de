"""The folder of the answers that a namespace keeps."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dynamo_local.core.answers.records import Kind, records_in
from dynamo_local.core.errors import StateError
from state.answers.journal import AnswerJournal, AnswerReader
from state.files import DISK, FILE_MODE, Disk, DiskError, make_private_directory, system_errors
from state.locks import lock_abandoned
from state.paths import StatePaths
from state.stored.folder import StoreFolder

VERSION = 1

_OWNER = "of-"
"""Before the name of an owner, which may be empty."""

_NEW, _RUNNING, _ENDED, _CANCEL = ".new", ".running", ".ended", ".cancel"
"""Endings of names: a journal that is being created, one that grows, one that has ended, and an order to end it."""

_ABANDONED_AFTER_S = 60.0
"""Age of a journal that nobody creates any more."""


class Kept(NamedTuple):
    """What is kept for an owner: the number of answers, and their bytes."""

    answers: int
    size: int


class Look(NamedTuple):
    """What is to be done: owner and id of answers that have not ended, and the ids of those that are to be."""

    running: list[tuple[str, str]]
    cancelled: set[str]


class JournalFolder:
    """Journals by owner, for any number of frontends. All methods block, and raise DiskError.

    Here an answer is whatever a journal has.
    """

    def __init__(self, path: Path, what: str, version: int, disk: Disk = DISK) -> None:
        """`what`: they are, for errors."""
        self.path = path
        self._disk = disk
        self._store = StoreFolder(path, what, version, disk)
        self._seen: dict[str, tuple[int, bool, list[str]]] = {}
        """For each owner's folder when it had changed, whether that is settled, and the names of what is to be done."""

    def check(self) -> None:
        """Check the folder, if there is one. Raises StateError if a later release has written it."""
        self._store.check()

    def create(self, owner: str, answer: str, data: bytes) -> AnswerJournal:
        """Create the journal of an answer with its first records. It is there with them on the disk, or not at all."""
        self._store.open()
        is_first = not self._of(owner).exists()
        path = make_private_directory(self._of(owner)) / f"{answer}{_NEW}"
        with system_errors(f"cannot create {path}"):
            if is_first:
                self._disk.sync_directory(self.path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        journal = AnswerJournal(owner, answer, path.with_suffix(_RUNNING), descriptor, 0, self._disk)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            journal.write(data)
            with system_errors(f"cannot rename {path}"):
                path.rename(journal.path)
                self._disk.sync_directory(journal.path.parent)
        except StateError:
            path.unlink(missing_ok=True)
            journal.path.unlink(missing_ok=True)
            journal.close()
            raise
        return journal

    def all(self) -> list[tuple[str, str]]:
        """Return owner and id of all that is kept."""
        found = {
            (path.parent.name.removeprefix(_OWNER), path.stem)
            for path in self._files()
            if path.suffix in (_RUNNING, _ENDED)
        }
        return sorted(found)

    def reader(self, owner: str, answer: str) -> AnswerReader | None:
        """Open the journal of an answer. None: this owner has no such answer."""
        # Twice, for it may end between two looks.
        for suffix in (_RUNNING, _ENDED, _ENDED):
            path = self._of(owner) / f"{answer}{suffix}"
            with system_errors(f"cannot read {path}"), suppress(FileNotFoundError):
                return AnswerReader(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return None

    def is_running(self, owner: str, answer: str) -> bool:
        """Whether the answer has not ended."""
        return (self._of(owner) / f"{answer}{_RUNNING}").exists()

    def look(self) -> Look:
        """Look what is to be done. However many answers are kept, folders in which nothing changes are not read again.

        To be called by one thread at a time."""
        running: list[tuple[str, str]] = []
        cancelled: set[str] = set()
        for name in self._store.items():
            owner = name.removeprefix(_OWNER)
            for found in self._unfinished(self.path / name):
                if found.endswith(_CANCEL):
                    cancelled.add(found.removesuffix(_CANCEL))
                else:
                    running.append((owner, found.removesuffix(_RUNNING)))
        return Look(running, cancelled)

    def take(self, owner: str, answer: str) -> AnswerJournal | None:
        """Take an answer whose frontend has died. None: somebody computes it, or it has ended."""
        path = self._of(owner) / f"{answer}{_RUNNING}"
        with system_errors(f"cannot open {path}"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                if not lock_abandoned(descriptor, path):
                    os.close(descriptor)
                    return None
                records = records_in(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
                size = records[-1].end if records else 0
                os.ftruncate(descriptor, size)
            except OSError:
                os.close(descriptor)
                raise
        journal = AnswerJournal(owner, answer, path, descriptor, size, self._disk)
        if records and records[-1].kind is not Kind.SYNCED:
            # Its frontend was killed between records and their mark. If they are the last ones, no other mark follows.
            try:
                journal.write(b"")
            except DiskError:
                journal.close()
                raise
        return journal

    def ask_to_cancel(self, owner: str, answer: str) -> None:
        """Have whoever computes the answer end it."""
        path = self._of(owner) / f"{answer}{_CANCEL}"
        with system_errors(f"cannot create {path}"):
            path.touch(FILE_MODE)

    def remove(self, owner: str, answer: str) -> bool:
        """Remove an answer that has ended. Returns whether there was one."""
        path = self._of(owner) / f"{answer}{_ENDED}"
        with system_errors(f"cannot remove {path}"):
            path.with_suffix(_CANCEL).unlink(missing_ok=True)
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def kept(self, owner: str) -> Kept:
        """Return what is kept for an owner."""
        sizes = [size for path in _listed(self._of(owner)) if (size := _size(path)) is not None]
        return Kept(len(sizes), sum(sizes))

    def remove_expired(self, now: float, kept_s: float) -> int:
        """Remove answers that ended more than `kept_s` ago, and what creations have left. Returns how many.

        `now`: in seconds since 1970.
        """
        removed = 0
        for path in self._files():
            limit = {_ENDED: kept_s, _NEW: _ABANDONED_AFTER_S, _CANCEL: kept_s}.get(path.suffix)
            with suppress(FileNotFoundError), system_errors(f"cannot remove {path}"):
                if limit is not None and path.stat().st_mtime < now - limit:
                    path.unlink()
                    removed += 1
        return removed

    def _unfinished(self, folder: Path) -> list[str]:
        before, is_settled, found = self._seen.get(folder.name, (0, False, []))
        with system_errors(f"cannot read {folder}"):
            changed = folder.stat().st_mtime_ns
        if changed == before and is_settled:
            return found
        # What comes right after a look may leave the time as it is: only what was found twice is settled.
        with system_errors(f"cannot list {folder}"), os.scandir(folder) as entries:
            # By name: there may be thousands, of which most have ended.
            found = sorted(each.name for each in entries if each.name.endswith((_RUNNING, _CANCEL)))
        self._seen[folder.name] = changed, changed == before, found
        return found

    def _of(self, owner: str) -> Path:
        return self.path / f"{_OWNER}{owner}"

    def _files(self) -> Iterator[Path]:
        for name in self._store.items():
            yield from _listed(self.path / name)


class AnswerFolder(JournalFolder):
    """The answers of one namespace."""

    def __init__(self, paths: StatePaths, disk: Disk = DISK) -> None:
        super().__init__(paths.answers_dir, "answers", VERSION, disk)


def _listed(folder: Path) -> list[Path]:
    with system_errors(f"cannot list {folder}"):
        try:
            return sorted(folder.iterdir())
        except FileNotFoundError:
            return []


def _size(path: Path) -> int | None:
    if path.suffix == _CANCEL:
        return None
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
