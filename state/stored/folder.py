"""The folder of a store: private, with a version, and with a lock for those who change what is in it.

    {folder}/store.json     {"schema_version": 1}
    {folder}/lock           held for the time of one change
    {folder}/parts/         what is being made; each part is locked by its maker
    {folder}/{item}/        a folder for each item

An item is made among the parts and renamed to its place when it is whole. To remove it, it is renamed back. So after a
kill at any moment an item is there as a whole or not at all, and what is left among the parts can be told from what is
being made: nobody has its lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dynamo_local.core.errors import StateError
from state.files import DIRECTORY_MODE, DISK, Disk, make_private_directory, remove_tree, replace_file, system_errors
from state.locks import FileLock

_LOCK_WITHIN_S = 10.0
_VERSION = "store.json"
_PARTS = "parts"
_OWN = frozenset({_VERSION, f"{_VERSION}.tmp", "lock", _PARTS})


class _Version(msgspec.Struct):
    schema_version: int


class Part:
    """An item that is being made, in a folder among the parts. Its maker holds it until `end`, or dies."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def end(self) -> None:
        """Let go of the part: what is still among the parts then is removed by the next sweep."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class StoreFolder:
    """A store's folder. `what`: what it is a store of. Safe from several threads and processes; calls block."""

    def __init__(self, path: Path, what: str, version: int, disk: Disk = DISK) -> None:
        self.path = path
        self.disk = disk
        self._what = what
        self._version = version
        self._is_open = False

    def open(self) -> None:
        """Make the folder if there is none, and check its version. Raises StateError: a later release wrote it, or it
        cannot be read; DiskError."""
        if self._is_open:
            return
        make_private_directory(self.path.parent)
        make_private_directory(self.path)
        with self.locked():
            if self._found() is None:
                replace_file(self.path / _VERSION, msgspec.json.encode(_Version(self._version)), self.disk)
                with system_errors(f"cannot write {self.path}"):
                    self.disk.sync_directory(self.path.parent)
        make_private_directory(self.path / _PARTS)
        self._is_open = True

    def check(self) -> None:
        """Check the version, if there is a store; none is made. Raises StateError as `open`."""
        self._exists()

    def items(self) -> list[str]:
        """Return the names of all items, in no order; none if the store was never opened. Raises StateError."""
        if not self._exists():
            return []
        with system_errors(f"cannot list {self.path}"):
            return [path.name for path in self.path.iterdir() if path.name not in _OWN]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody else from changing the store. Raises StateError if somebody else does for long."""
        lock = FileLock(self.path / "lock")
        lock.acquire(_LOCK_WITHIN_S)
        try:
            yield
        finally:
            lock.release(remove=True)

    def begin(self) -> Part:
        """Begin an item. Raises DiskError."""
        self.open()
        path = self.path / _PARTS / secrets.token_hex(12)
        # A sweep must not find it before it is locked.
        with self.locked(), system_errors(f"cannot write to {self.path}"):
            path.mkdir(mode=DIRECTORY_MODE)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Part(path, descriptor)

    def keep(self, part: Part, name: str) -> None:
        """Make a whole item of a part. Its files are on the disk already. Raises DiskError; then it is a part still."""
        with system_errors(f"cannot write {self.path / name}"):
            self.disk.sync_directory(part.path)
            self.disk.rename(part.path, self.path / name)
            part.path = self.path / name
            self.disk.sync_directory(self.path)

    def remove(self, name: str) -> bool:
        """Remove an item. Returns whether there was one. Raises DiskError."""
        self.open()
        gone = self.path / _PARTS / secrets.token_hex(12)
        with system_errors(f"cannot remove {self.path / name}"):
            try:
                self.disk.rename(self.path / name, gone)
            except FileNotFoundError:
                return False
            remove_tree(gone)
        return True

    def drop(self, part: Part) -> None:
        """Remove a part that is not to become an item. Raises DiskError."""
        with system_errors(f"cannot remove {part.path}"):
            remove_tree(part.path)
        part.end()

    def sweep(self) -> int:
        """Remove parts that nobody makes any more. Returns their number. Raises StateError."""
        if not self._exists():
            return 0
        self.open()
        with self.locked(), system_errors(f"cannot clear {self.path / _PARTS}"):
            left = [path for path in (self.path / _PARTS).iterdir() if _is_left(path)]
            for path in left:
                remove_tree(path)
        return len(left)

    def _exists(self) -> bool:
        """Whether there is a store: looking for something makes none. Raises StateError."""
        return self._is_open or self._found() is not None

    def _found(self) -> int | None:
        """Return the version of the store; None: there is none yet. Raises StateError."""
        path = self.path / _VERSION
        remedy = f"upgrade, or move {self.path} away"
        with system_errors(f"cannot read {path}"):
            try:
                found = msgspec.json.decode(path.read_bytes(), type=_Version).schema_version
            except FileNotFoundError:
                return None
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise StateError(f"the store of {self._what} cannot be read: {path}: {error}", remedy) from error
        if found > self._version:
            raise StateError(
                f"the store of {self._what} has version {found}; this release knows version {self._version}", remedy
            )
        return found


def _is_left(path: Path) -> bool:
    """Whether nobody makes the part. May be wrong while the store is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Whoever removes it was faster.
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
