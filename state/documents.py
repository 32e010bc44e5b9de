"""Documents that outlive the server: each in a file and a copy, both replaced atomically, mode 0600.

    {"sha256": "<64 digits>", "sequence": 7, "schema_version": 1, ...}

The checksum is of all bytes behind it, so that a file which was cut or damaged anywhere is known to be. Of two good
files, the one with the higher sequence number holds. All versions begin with checksum and sequence number.

Only the server writes, under its lock. Readers take none: they see one whole version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from dynamo_local.core.documents import Convert, NewerDocumentError
from dynamo_local.core.errors import StateError
from state.files import DISK, Disk, make_private_directory, replace_file, system_errors
from state.locks import ServerLock
from state.paths import StatePaths

_BEFORE_SUM, _AFTER_SUM = b'{"sha256": "', b'", '
_SUM_LENGTH = 64


_T = TypeVar("_T")


@dataclass(frozen=True)
class Stored(Generic[_T]):
    """A document as a file holds it. `version`: that of the release that wrote the file; None: the present one."""

    content: _T
    sequence: int
    version: int | None = None


@dataclass(frozen=True)
class DocumentKind(Generic[_T]):
    """A kind of document. `what`: what it is a registry of. `files`: the copy and the file of a namespace, in the order
    in which they are written; `backup`: where the document of an earlier release is kept. `remedy`: what to do if
    neither file can be read. `read(document, conversions)` returns the content and its version, and raises StateError,
    or NewerDocumentError for what a later release has written."""

    what: str
    version: int
    empty: _T
    files: Callable[[StatePaths], tuple[Path, Path]]
    backup: Callable[[StatePaths, int], Path]
    remedy: str
    write: Callable[[_T], dict[str, Any]]
    read: Callable[[Any, Mapping[int, Convert]], tuple[_T, int]]
    conversions: Mapping[int, Convert]


class DamagedDocumentError(StateError):
    """A file is no such document, or not a whole one."""


def encode(kind: DocumentKind[_T], stored: Stored[_T]) -> bytes:
    """The bytes of a file."""
    document = {"sequence": stored.sequence, **kind.write(stored.content)}
    body = msgspec.json.format(msgspec.json.encode(document), indent=2)[1:].lstrip() + b"\n"
    return _BEFORE_SUM + _sum(body) + _AFTER_SUM + body


def decode(kind: DocumentKind[_T], data: bytes, conversions: Mapping[int, Convert] | None = None) -> Stored[_T]:
    """Inverse of `encode`, also for files of older releases. Raises DamagedDocumentError for anything else, and
    NewerDocumentError for what a later release has written."""
    start = len(_BEFORE_SUM) + _SUM_LENGTH + len(_AFTER_SUM)
    head, body = data[:start], data[start:]
    if not data:
        raise DamagedDocumentError("it is empty")
    if head != _BEFORE_SUM + _sum(body) + _AFTER_SUM:
        raise DamagedDocumentError("its checksum is wrong: it was cut or changed")
    try:
        document = msgspec.json.decode(b"{" + body)
        sequence = msgspec.convert(document.pop("sequence"), int)
        content, version = kind.read(document, kind.conversions if conversions is None else conversions)
    except NewerDocumentError:
        raise
    except StateError as error:
        raise DamagedDocumentError(error.cause) from error
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError) as error:
        raise DamagedDocumentError(f"it is no registry of {kind.what}: {error}") from error
    return Stored(content, sequence, None if version == kind.version else version)


def read_document(
    kind: DocumentKind[_T], paths: StatePaths, conversions: Mapping[int, Convert] | None = None
) -> Stored[_T] | None:
    """The document of a namespace, whether or not its server runs; None if none was ever made.

    Raises StateError, with the remedy, if neither file can be read or a later release wrote one.
    """
    return _Found.of(kind, paths, conversions).best()


class DocumentStore(Generic[_T]):
    """A document of one namespace, for the server that holds its lock. Safe from any one thread at a time."""

    def __init__(
        self,
        kind: DocumentKind[_T],
        lock: ServerLock,
        *,
        disk: Disk = DISK,
        conversions: Mapping[int, Convert] | None = None,
    ) -> None:
        self._kind = kind
        self._lock = lock
        self._paths = lock.paths
        self._disk = disk
        self._conversions = conversions
        self._sequence = 0

    def open(self) -> tuple[_T, tuple[str, ...]]:
        """Read the document, and write anew what is damaged, missing or of an earlier release, of which a backup is
        kept. Returns it with a note for each of these.

        Raises StateError as `read_document`, and DiskError if a file cannot be written.
        """
        kind = self._kind
        found = _Found.of(kind, self._paths, self._conversions)
        stored = found.best()
        if stored is None:
            return kind.empty, ()
        self._sequence = stored.sequence
        notes: list[str] = []
        if stored.version is not None:
            backup = kind.backup(self._paths, stored.version)
            replace_file(backup, found.bytes_of(stored), self._disk)
            notes.append(
                f"converted the registry of {kind.what} from version {stored.version}, which is kept: {backup}"
            )
        notes += [f"wrote {path} anew from its copy: {error.cause}" for path, error in found.damaged.items()]
        if any(found.good.get(path) != stored for path in kind.files(self._paths)) or notes:
            self.write(stored.content)
        return stored.content, tuple(notes)

    def write(self, content: _T) -> None:
        """Replace the document. Raises DiskError; the files then hold what they held before.

        The copy goes first: an order that was confirmed is in both.
        """
        if not self._lock.held:
            raise StateError(f"the registry of {self._kind.what} is only written under the server lock")
        make_private_directory(self._paths.root)
        data = encode(self._kind, Stored(content, self._sequence + 1))
        before = {path: _read(path) for path in self._kind.files(self._paths)}
        try:
            for path in before:
                replace_file(path, data, self._disk)
        except StateError:
            if any(_read(path) != data for path in before):
                self._put_back(before)
                raise
            # Both were replaced: only their folder could not be synchronised, which matters in a power cut alone.
        self._sequence += 1

    def _put_back(self, before: Mapping[Path, bytes | None]) -> None:
        for path, data in before.items():
            if _read(path) == data:
                continue
            if data is not None:
                with suppress(StateError):
                    replace_file(path, data, self._disk)
            # Without room for the old contents, the other file, which still has them, is enough.
            if _read(path) != data and any(_read(other) == old for other, old in before.items() if other != path):
                with system_errors(f"cannot remove {path}"):
                    path.unlink(missing_ok=True)


def forget_document(kind: DocumentKind[_T], lock: ServerLock) -> bool:
    """Remove the document with its copy and backups; it need not be readable. Returns whether there was one.

    The caller holds the server lock. Raises DiskError.
    """
    if not lock.held:
        raise StateError(f"the registry of {kind.what} is only removed under the server lock")
    paths = lock.paths
    backups = (kind.backup(paths, version) for version in range(kind.version))
    found = False
    for path in (*backups, *kind.files(paths)):
        for each in (path.with_name(f"{path.name}.tmp"), path):
            with system_errors(f"cannot remove {each}"):
                found |= os.path.lexists(each)
                each.unlink(missing_ok=True)
    return found


def has_document(kind: DocumentKind[_T], paths: StatePaths) -> bool:
    """Whether the namespace has files of the document, readable or not."""
    return any(map(os.path.lexists, kind.files(paths)))


@dataclass(frozen=True)
class _Found(Generic[_T]):
    """What the files of a namespace hold: `good` documents, and why the `damaged` ones cannot be read."""

    kind: DocumentKind[_T]
    good: dict[Path, Stored[_T]]
    damaged: dict[Path, StateError]
    data: dict[Path, bytes]

    @classmethod
    def of(cls, kind: DocumentKind[_T], paths: StatePaths, conversions: Mapping[int, Convert] | None) -> _Found[_T]:
        """Read both files. Raises NewerDocumentError."""
        found = cls(kind, {}, {}, {})
        for path in kind.files(paths):
            try:
                data = _read(path)
                if data is not None:
                    found.data[path] = data
                    found.good[path] = decode(kind, data, conversions)
            except NewerDocumentError:
                raise
            except StateError as error:
                found.damaged[path] = error
        return found

    def best(self) -> Stored[_T] | None:
        """The document that holds; None if there is no file. Raises StateError if there are only damaged ones."""
        if self.good:
            return max(self.good.values(), key=lambda stored: stored.sequence)
        if self.damaged:
            reasons = "; ".join(f"{path}: {error.cause}" for path, error in self.damaged.items())
            raise StateError(f"the registry of {self.kind.what} cannot be read ({reasons})", self.kind.remedy)
        return None

    def bytes_of(self, stored: Stored[_T]) -> bytes:
        """The file that holds it, as it is."""
        return next(self.data[path] for path, each in self.good.items() if each is stored)


def _read(path: Path) -> bytes | None:
    """The contents of a file; None if there is none. Raises DiskError."""
    with system_errors(f"cannot read {path}"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
