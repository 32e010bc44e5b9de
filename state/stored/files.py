"""The store of files: content and metadata of each, kept until it is deleted or expires.

    {folder}/file-<24 digits>/metadata.json     core.stored.files.StoredFile
    {folder}/file-<24 digits>/content

A file never changes. Calls block.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from dynamo_local.core.errors import ItemAbsentError, StateError
from dynamo_local.core.stored.files import FILE_ID, FileLimits, StoredFile, check_room
from state.files import DISK, Disk, replace_file, system_errors
from state.paths import StatePaths
from state.stored.folder import Part, StoreFolder

FILES_VERSION = 1

_METADATA, _CONTENT = "metadata.json", "content"


@dataclass(frozen=True)
class FileDescription:
    """What is said of a file before it is stored. `expires_after_s`: from the moment on at which it is whole."""

    owner: str
    filename: str
    purpose: str
    expires_after_s: int


class NewFile:
    """A file that is being stored. To be ended by `drop` unless `FileStore.keep` has succeeded."""

    def __init__(self, folder: StoreFolder) -> None:
        """Raises DiskError."""
        self._folder = folder
        self.part = folder.begin()
        self.size = 0
        try:
            with system_errors(f"cannot write to {folder.path}"):
                self._descriptor: int | None = folder.disk.create(self.part.path / _CONTENT)
        except StateError:
            folder.drop(self.part)
            raise

    def write(self, data: bytes) -> None:
        """Append to the content. Raises DiskError."""
        assert self._descriptor is not None
        with system_errors(f"cannot write to {self._folder.path}"):
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[self._folder.disk.write(self._descriptor, bytes(remaining)) :]
        self.size += len(data)

    def sync(self) -> None:
        """Have the content on the disk. Raises DiskError."""
        if self._descriptor is not None:
            with system_errors(f"cannot write to {self._folder.path}"):
                self._folder.disk.sync(self._descriptor)
            self._close()

    def drop(self) -> None:
        """Remove what there is of the file. Raises DiskError."""
        self._close()
        self._folder.drop(self.part)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class FileStore:
    """The files of one namespace. Several processes may have one."""

    def __init__(self, paths: StatePaths, limits: FileLimits | None = None, disk: Disk = DISK) -> None:
        self._folder = StoreFolder(paths.files_dir, "files", FILES_VERSION, disk)
        self._limits = limits or FileLimits()
        self._known: dict[str, StoredFile] = {}

    def begin(self, owner: str, bytes_announced: int = 0) -> NewFile:
        """Begin a file. Raises StorageFullError, StateError."""
        self._folder.open()
        self._check_room(owner, bytes_announced)
        return NewFile(self._folder)

    def keep(self, new: NewFile, description: FileDescription, now: float) -> StoredFile:
        """Store a file whose content is whole, whatever happens from here on.

        Raises StorageFullError, StateError; then it is not stored, and to be dropped.
        """
        new.sync()
        self._folder.open()
        with self._folder.locked():
            self._check_room(description.owner, new.size)
            return self._place(new.part, _file(description, new.size, now))

    def adopt(self, content: Path, file_id: str, description: FileDescription, now: float) -> StoredFile:
        """Store a file of the same file system, which changes no more, under this id, without copying it. Bounds are
        for clients: this has none. One that is stored already stays. Raises StateError."""
        self._folder.open()
        if (found := self._read(file_id)) is not None:
            return found
        part = self._folder.begin()
        try:
            with system_errors(f"cannot store {content}"):
                os.link(content, part.path / _CONTENT)
                size = content.stat().st_size
            return self._place(part, _file(description, size, now, file_id))
        except BaseException:
            self._folder.drop(part)
            raise

    def lend(self, file: StoredFile, to: Path) -> None:
        """Put the content there as well, in the same file system, where it outlives the file. Raises StateError."""
        with system_errors(f"cannot write {to}"), _absent_where_gone(file.id):
            os.link(self._folder.path / file.id / _CONTENT, to)

    def find(self, owner: str, file_id: str, now: float) -> StoredFile:
        """Return a file of this owner. Raises ItemAbsentError, StateError."""
        found = self._read(file_id)
        if found is None or found.owner != owner or found.has_expired(now):
            raise _absent(file_id)
        return found

    def open(self, file: StoredFile) -> BinaryIO:
        """Open the content of a file, which can be read to its end even if it is deleted meanwhile. Raises
        ItemAbsentError, StateError."""
        path = self._folder.path / file.id / _CONTENT
        with system_errors(f"cannot read {path}"), _absent_where_gone(file.id):
            return path.open("rb")

    def listed(self, owner: str, now: float) -> list[StoredFile]:
        """Return the files of this owner, the newest first. Raises StateError."""
        files = [file for file in self._all() if file.owner == owner and not file.has_expired(now)]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def remove(self, owner: str, file_id: str, now: float) -> None:
        """Delete a file of this owner. Raises ItemAbsentError, StateError."""
        file = self.find(owner, file_id, now)
        self._known.pop(file.id, None)
        if not self._folder.remove(file.id):
            raise _absent(file_id)

    def sweep(self, now: float) -> int:
        """Remove files that have expired, and remains of those that were never whole. Returns their number. Raises
        StateError."""
        removed = self._folder.sweep()
        for file in self._all():
            if file.has_expired(now):
                self._known.pop(file.id, None)
                removed += self._folder.remove(file.id)
        return removed

    def _place(self, part: Part, file: StoredFile) -> StoredFile:
        replace_file(part.path / _METADATA, msgspec.json.encode(file), self._folder.disk)
        self._folder.keep(part, file.id)
        part.end()
        return file

    def _check_room(self, owner: str, more: int) -> None:
        check_room(self._all(), owner, more, self._limits)

    def _all(self) -> Sequence[StoredFile]:
        """Return all files. One whose metadata cannot be read is as if it were not there: it must not block others."""
        names = set(self._folder.items())
        for gone in self._known.keys() - names:
            self._known.pop(gone, None)
        for new in names - self._known.keys():
            with suppress(StateError):
                if (file := self._read(new)) is not None:
                    self._known[new] = file
        return list(self._known.values())

    def _read(self, file_id: str) -> StoredFile | None:
        """Return a file; None: there is none of that id. Raises StateError."""
        if FILE_ID.fullmatch(file_id) is None:
            return None
        path = self._folder.path / file_id / _METADATA
        with system_errors(f"cannot read {path}"):
            try:
                return msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except FileNotFoundError:
                return None
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise StateError(f"{path} is damaged: {error}", "delete its folder") from error


def _file(description: FileDescription, size: int, now: float, file_id: str | None = None) -> StoredFile:
    return StoredFile(
        file_id or f"file-{secrets.token_hex(12)}",
        description.owner,
        description.filename,
        description.purpose,
        size,
        int(now),
        int(now) + description.expires_after_s,
    )


def _absent(file_id: str) -> ItemAbsentError:
    return ItemAbsentError(f"no such file: {file_id[:64]}")


@contextmanager
def _absent_where_gone(file_id: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _absent(file_id) from error
