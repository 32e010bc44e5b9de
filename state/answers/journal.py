"""The journal of one answer: written by the frontend that computes the answer, read by all."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from dynamo_local.core.answers.records import Kind, Record, record, records_in, shown
from state.files import DISK, Disk, system_errors

_MARK = record(Kind.SYNCED)


class AnswerJournal:
    """A journal whose lock this process holds. `size`: of what is written, in bytes.

    Used by one thread at a time. An error leaves the journal as it was before the call.
    """

    def __init__(self, owner: str, answer: str, path: Path, descriptor: int, size: int, disk: Disk = DISK) -> None:
        self.owner = owner
        self.answer = answer
        self.path = path
        self.size = size
        self._descriptor = descriptor
        self._disk = disk

    def write(self, data: bytes, *, durable: bool = True) -> None:
        """Append records, and mark them when they are on the disk. `durable`: else a power cut may lose them. Raises
        DiskError."""
        with system_errors(f"cannot write {self.path}"):
            begin = self.size
            try:
                self._append(data)
                if durable:
                    self._disk.sync(self._descriptor)
                self._append(_MARK)
            except OSError:
                os.ftruncate(self._descriptor, begin)
                self.size = begin
                raise

    def read(self) -> list[Record]:
        """Return all records, those that are not known to be on the disk included. Raises DiskError."""
        with system_errors(f"cannot read {self.path}"):
            return records_in(os.pread(self._descriptor, self.size, 0))

    def end(self) -> None:
        """Note that nothing follows, and let go of the lock. A rename needs no room: a journal without an end, whose
        disk was full, ends as well. Raises DiskError."""
        with system_errors(f"cannot rename {self.path}"):
            self.path.rename(self.path.with_suffix(".ended"))
            self._disk.sync_directory(self.path.parent)
        self.path.with_suffix(".cancel").unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock: another frontend goes on with the answer, if it has not ended."""
        os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        # Where it stands, and not where the file ends: a write that failed may have left a part.
        if os.pwrite(self._descriptor, data, self.size) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(data)


class AnswerReader:
    """Reads a journal while it grows. Blocks for the time of a read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    @property
    def has_more(self) -> bool:
        """Whether the journal has grown since the last read."""
        return os.fstat(self._descriptor).st_size > self._at

    @property
    def is_removed(self) -> bool:
        """Whether the answer was deleted."""
        return os.fstat(self._descriptor).st_nlink == 0

    def read(self) -> Sequence[Record]:
        """Return the records that are on the disk, and were not returned before."""
        size = os.fstat(self._descriptor).st_size
        found = shown(records_in(os.pread(self._descriptor, size - self._at, self._at), self._at))
        if found:
            self._at = found[-1].end
        return found

    def close(self) -> None:
        """End the reading."""
        os.close(self._descriptor)
