"""The journal of one frontend: a record appended for each request, in one write.

A record that was written survives the death of the process. It is not forced to the disk: a power cut may take the last
seconds, which are then missing in the totals as well.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import StateError
from dynamo_local.core.usage.records import UsageRecord, line_of
from state.files import FILE_MODE, make_private_directory
from state.locks import lock_abandoned
from state.paths import StatePaths

MAX_PENDING = 10_000
"""Records that are kept in memory while they cannot be written. Of more, the oldest are lost, and counted."""

MAX_BYTES = 1024 * 1024
"""Size at which a journal ends and the next begins: some seven thousand records."""


class UsageJournal:
    """Appends records, from one thread. Never raises: those that cannot be written are kept, and written with a later
    one.

    `lease`: the frontend's own. `on_failure` is told why records cannot be written, once each time that this begins,
    and nothing when it is over.
    """

    def __init__(
        self,
        paths: StatePaths,
        lease: str,
        on_failure: Callable[[str], None],
        *,
        max_bytes: int = MAX_BYTES,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._paths = paths
        self._lease = lease
        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._max_pending = max_pending
        self._pending: deque[UsageRecord] = deque()
        self._descriptor: int | None = None
        self._size = 0
        self._number = 0
        self._failing = False
        self._unwritten = 0
        """Records that were lost, and that no record tells of yet."""
        self.lost = 0
        """Records that were lost."""

    @property
    def pending(self) -> int:
        """Number of records that are kept because they cannot be written."""
        return len(self._pending)

    def write(self, record: UsageRecord) -> None:
        """Append a record, behind those that are kept."""
        self._pending.append(record)
        if len(self._pending) > self._max_pending:
            self._pending.popleft()
            self._unwritten += 1
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Write what is kept, if there is anything."""
        try:
            while self._pending:
                self._append(line_of(self._pending[0]))
                self._pending.popleft()
            if self._unwritten:
                self._append(line_of(UsageRecord(0.0, requests=0, lost=self._unwritten)))
                self._unwritten = 0
        except (OSError, StateError) as error:
            self._note(error.strerror or str(error) if isinstance(error, OSError) else str(error))
        else:
            self._failing = False

    def close(self) -> None:
        """Write what can be, and end the journal."""
        self.flush()
        self._end()
        self.lost += len(self._pending)
        self._pending.clear()

    def _append(self, line: bytes) -> None:
        if self._descriptor is not None and (self._size + len(line) > self._max_bytes or self._is_removed()):
            self._end()
        descriptor = self._open() if self._descriptor is None else self._descriptor
        if os.write(descriptor, line) < len(line):
            # A disk that has become full takes a part.
            os.ftruncate(descriptor, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def _is_removed(self) -> bool:
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_nlink == 0

    def _open(self) -> int:
        """Begin the next journal."""
        make_private_directory(self._paths.usage_dir)
        while True:
            self._number += 1
            descriptor = _lock_new(self._paths.usage_journal(self._lease, self._number))
            if descriptor is not None:
                self._descriptor, self._size = descriptor, 0
                return descriptor

    def _end(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _note(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            self._on_failure(f"usage cannot be written to {self._paths.usage_dir}, and is kept in memory: {why}")


def _lock_new(path: Path) -> int | None:
    """Create a file, and lock it. None: there is one, or it was taken for one that has ended, and removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return None
    if lock_abandoned(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None
