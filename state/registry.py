"""The registry of endpoints on disk: a file and a copy, each replaced atomically, mode 0600. They outlive the server.

    {"sha256": "<64 digits>", "sequence": 7, "schema_version": 1, ...}

The checksum is of all bytes behind it, so that a file which was cut or damaged anywhere is known to be. Of two good
files, the one with the higher sequence number holds. All versions begin with checksum and sequence number.

Only the server writes, under its lock. Readers take none: they see one whole version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_local.core.endpoints.registry import (
    CONVERSIONS,
    SCHEMA_VERSION,
    Convert,
    NewerRegistryError,
    Registry,
    from_document,
    to_document,
)
from dynamo_local.core.errors import StateError
from state.files import DISK, Disk, make_private_directory, replace_file, system_errors
from state.locks import ServerLock
from state.paths import StatePaths

_BEFORE_SUM, _AFTER_SUM = b'{"sha256": "', b'", '
_SUM_LENGTH = 64


@dataclass(frozen=True)
class Stored:
    """A registry as a file holds it. `version`: that of the release that wrote the file."""

    registry: Registry
    sequence: int
    version: int = SCHEMA_VERSION


class DamagedRegistryError(StateError):
    """A file is no registry, or not a whole one."""


def encode(stored: Stored) -> bytes:
    """The bytes of a file."""
    document = {"sequence": stored.sequence, **to_document(stored.registry)}
    body = msgspec.json.format(msgspec.json.encode(document), indent=2)[1:].lstrip() + b"\n"
    return _BEFORE_SUM + _sum(body) + _AFTER_SUM + body


def decode(data: bytes, conversions: Mapping[int, Convert] = CONVERSIONS) -> Stored:
    """Inverse of `encode`, also for files of older releases. Raises DamagedRegistryError for anything else, and
    NewerRegistryError for what a later release has written."""
    start = len(_BEFORE_SUM) + _SUM_LENGTH + len(_AFTER_SUM)
    head, body = data[:start], data[start:]
    if not data:
        raise DamagedRegistryError("it is empty")
    if head != _BEFORE_SUM + _sum(body) + _AFTER_SUM:
        raise DamagedRegistryError("its checksum is wrong: it was cut or changed")
    try:
        document = msgspec.json.decode(b"{" + body)
        sequence = msgspec.convert(document.pop("sequence"), int)
        registry, version = from_document(document, conversions)
    except NewerRegistryError:
        raise
    except StateError as error:
        raise DamagedRegistryError(error.cause) from error
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError) as error:
        raise DamagedRegistryError(f"it is no registry: {error}") from error
    return Stored(registry, sequence, version)


def read_registry(paths: StatePaths, conversions: Mapping[int, Convert] = CONVERSIONS) -> Registry:
    """The endpoints of a namespace, whether or not its server runs; an empty registry if none was ever made.

    Raises StateError, with `--forget` as the remedy, if neither file can be read or a later release wrote one.
    """
    found = _Found.of(paths, conversions).best()
    return Registry() if found is None else found.registry


class RegistryStore:
    """The registry of one namespace, for the server that holds its lock. Safe from any one thread at a time."""

    def __init__(
        self, lock: ServerLock, *, disk: Disk = DISK, conversions: Mapping[int, Convert] = CONVERSIONS
    ) -> None:
        self._lock = lock
        self._paths = lock.paths
        self._disk = disk
        self._conversions = conversions
        self._sequence = 0

    def open(self) -> tuple[Registry, tuple[str, ...]]:
        """Read the registry, and write anew what is damaged, missing or of an earlier release, of which a backup is
        kept. Returns it with a note for each of these.

        Raises StateError as `read_registry`, and DiskError if a file cannot be written.
        """
        found = _Found.of(self._paths, self._conversions)
        stored = found.best()
        if stored is None:
            return Registry(), ()
        self._sequence = stored.sequence
        notes: list[str] = []
        if stored.version != SCHEMA_VERSION:
            backup = self._paths.registry_backup(stored.version)
            replace_file(backup, found.bytes_of(stored), self._disk)
            notes.append(f"converted the registry of endpoints from version {stored.version}, which is kept: {backup}")
        notes += [f"wrote {path} anew from its copy: {error.cause}" for path, error in found.damaged.items()]
        if any(found.good.get(path) != stored for path in _files(self._paths)) or notes:
            self.write(stored.registry)
        return stored.registry, tuple(notes)

    def write(self, registry: Registry) -> None:
        """Replace the registry. Raises DiskError; the files then hold what they held before.

        The copy goes first: an order that was confirmed is in both.
        """
        if not self._lock.held:
            raise StateError("the registry of endpoints is only written under the server lock")
        make_private_directory(self._paths.root)
        data = encode(Stored(registry, self._sequence + 1))
        before = {path: _read(path) for path in _files(self._paths)}
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


def forget(lock: ServerLock) -> bool:
    """Remove the registry with its copy and backups; it need not be readable. Returns whether there was one.

    The caller holds the server lock. Raises DiskError.
    """
    if not lock.held:
        raise StateError("the registry of endpoints is only removed under the server lock")
    paths = lock.paths
    backups = (paths.registry_backup(version) for version in range(SCHEMA_VERSION))
    found = False
    for path in (*backups, paths.registry_copy, paths.registry_file):
        for each in (path.with_name(f"{path.name}.tmp"), path):
            with system_errors(f"cannot remove {each}"):
                found |= os.path.lexists(each)
                each.unlink(missing_ok=True)
    return found


def has_registry(paths: StatePaths) -> bool:
    """Whether the namespace has files of a registry, readable or not."""
    return any(map(os.path.lexists, _files(paths)))


@dataclass(frozen=True)
class _Found:
    """What the files of a namespace hold: `good` registries, and why the `damaged` ones cannot be read."""

    good: dict[Path, Stored]
    damaged: dict[Path, StateError]
    data: dict[Path, bytes]

    @classmethod
    def of(cls, paths: StatePaths, conversions: Mapping[int, Convert]) -> _Found:
        """Read both files. Raises NewerRegistryError."""
        found = cls({}, {}, {})
        for path in _files(paths):
            try:
                data = _read(path)
                if data is not None:
                    found.data[path] = data
                    found.good[path] = decode(data, conversions)
            except NewerRegistryError:
                raise
            except StateError as error:
                found.damaged[path] = error
        return found

    def best(self) -> Stored | None:
        """The registry that holds; None if there is no file. Raises StateError if there are only damaged ones."""
        if self.good:
            return max(self.good.values(), key=lambda stored: stored.sequence)
        if self.damaged:
            reasons = "; ".join(f"{path}: {error.cause}" for path, error in self.damaged.items())
            raise StateError(
                f"the registry of endpoints cannot be read ({reasons})",
                "put a backup in its place, or drop the endpoints: dynamo serve --forget, dynamo stop --forget",
            )
        return None

    def bytes_of(self, stored: Stored) -> bytes:
        return next(self.data[path] for path, each in self.good.items() if each is stored)


def _files(paths: StatePaths) -> tuple[Path, Path]:
    """The two files in the order in which they are written."""
    return paths.registry_copy, paths.registry_file


def _read(path: Path) -> bytes | None:
    """The contents of a file; None if there is none. Raises DiskError."""
    with system_errors(f"cannot read {path}"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
