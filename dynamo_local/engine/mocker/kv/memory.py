"""Contents of the KV blocks, in memory that other processes can read without this one's help.

The mocker has no keys and values. A block's content is instead 16 bytes that say what was computed into it, from
which tokens and from which blocks before it; with KV of somebody else before it, another content comes out. That
and the tokens drawn (`contents.py`) make KV that is where it does not belong visible, as garbage of a real model.

The memory is shared as a file: a one-sided read is a read of that file, which asks the source nothing, and finds
what the source has written last, whatever that is. The source keeps the file locked as long as it lives, and the
kernel gives the lock up with the process: the memory of a dead engine cannot be read, as with a real network.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from dynamo_local.core.errors import EngineError

SLOT_BYTES = 16
_SUFFIX = ".kv"


class BlockMemory:
    """Memory of a pool: one content for each block. Private until it is shared."""

    def __init__(self, blocks: int) -> None:
        self._slots: bytearray | mmap.mmap = bytearray(blocks * SLOT_BYTES)
        self._path: Path | None = None
        self._descriptor: int | None = None

    @property
    def path(self) -> Path | None:
        """File in which other processes can read the memory; None: it is private."""
        return self._path

    def share(self, directory: Path) -> None:
        """Move the memory into a file of its own, mode 0600. Raises EngineError."""
        try:
            self._open(directory)
        except OSError as error:
            raise EngineError(f"cannot share KV blocks in {directory}: {error.strerror or error}") from error

    def close(self) -> None:
        """Make the memory private again. Readers that come later find no file."""
        if self._path is None or self._descriptor is None:
            return
        self._path.unlink(missing_ok=True)
        self._slots = bytearray(self._slots)
        os.close(self._descriptor)
        self._path = self._descriptor = None

    def write(self, block: int, content: bytes) -> None:
        self._slots[block * SLOT_BYTES : (block + 1) * SLOT_BYTES] = content

    def read(self, blocks: Iterable[int]) -> list[bytes]:
        slots = self._slots
        return [bytes(slots[block * SLOT_BYTES : (block + 1) * SLOT_BYTES]) for block in blocks]

    def clear(self) -> None:
        """Fill all blocks with zeros, which are the content of none."""
        self._slots[:] = bytes(len(self._slots))

    def _open(self, directory: Path) -> None:
        unfinished = directory / f"{secrets.token_hex(8)}.new"
        path = unfinished.with_suffix(_SUFFIX)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, len(self._slots))
            slots = mmap.mmap(descriptor, len(self._slots))
            slots[:] = bytes(self._slots)
            # Locked before it has the name that others look for: a file with that name and no lock is a dead one's.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._slots, self._path, self._descriptor = slots, path, descriptor


def read_remote(path: Path, blocks: Sequence[int]) -> list[bytes]:
    """Read what another engine's blocks hold now. Raises EngineError if that engine is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the source's memory cannot be opened: {error.strerror}") from error
    try:
        contents = [os.pread(descriptor, SLOT_BYTES, block * SLOT_BYTES) for block in blocks]
        if any(len(content) != SLOT_BYTES for content in contents):
            raise EngineError("the source has no such blocks")
        if not _locked(descriptor):
            raise EngineError("the source is dead")
    except OSError as error:
        raise EngineError(f"the source's memory cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return contents


def _locked(descriptor: int) -> bool:
    """Whether the engine that made the file lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
