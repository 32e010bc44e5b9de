"""The file in which all frontends of a server count together, and the place that each of them has there.

    place p of a frontend           byte p: 1 if it is taken; locked by the frontend as long as it lives
    when the keys changed last      a number (state/limits_file.py)
    from HEAD on                    what is counted: of keys (keys/counters.py), of models (rooms.py)

The file is mapped into each frontend. What several frontends change is changed under a lock on one byte, for
microseconds; a frontend that is alone needs none. Locks belong to open files (OFD locks), so the kernel frees those of
a frontend that is killed; what it had counted is dropped by whoever finds its place unlocked. Nothing here is durable:
the file is in the run directory, and an empty one is a fresh start.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dynamo_local.log_once import LogOnce
from state.files import FILE_MODE, make_private_directory, system_errors

_log = logging.getLogger(__name__)

PLACES = 64
"""Frontends that count at the same time. Further ones share the last place."""

HEAD = 4096
SIZE = 4 * 1024 * 1024
"""Size of the file, in bytes."""

_JOIN_S = 0.05
_CLAIM_LOCK = 1023

_FLOCK = struct.Struct("hhqqi4x")
_ATTEMPTS, _PAUSE_S = 100, 50e-6
"""A holder keeps a lock for microseconds. One that is stopped in between must not stop the others: after these attempts
they go on without the lock, and may miscount what that one had under way."""


class Places:
    """The file, and the place of this frontend. To be used by its event loop alone."""

    def __init__(self, path: Path) -> None:
        """Raises StateError if the file cannot be made."""
        make_private_directory(path.parent)
        with system_errors(f"cannot open {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            # Room for all of it now: a page that the disk has no room for later would kill the process.
            os.posix_fallocate(self._file, 0, SIZE)
            self.map = mmap.mmap(self._file, SIZE)
        self._log_once = LogOnce(_log)
        self.own = self._claim()
        self._alone_places = bytes(int(place == self.own) for place in range(PLACES))

    def close(self) -> None:
        """Give up the place. No view of the map may be left."""
        self.map[self.own] = 0
        self.map.close()
        os.close(self._file)

    @property
    def alone(self) -> bool:
        """Whether no other frontend has a place."""
        return self.map[:PLACES] == self._alone_places

    def lock(self, at: int) -> bool:
        """Take the lock of one byte. False: somebody who is stopped has it."""
        for _ in range(_ATTEMPTS):
            if self._set_lock(at, fcntl.F_WRLCK):
                return True
            time.sleep(_PAUSE_S)
        self._log_once.warn("a frontend does not let go of a limit: it is stopped; limits may be inexact")
        return False

    def unlock(self, at: int) -> None:
        """Give up the lock of one byte."""
        self._set_lock(at, fcntl.F_UNLCK)

    def drop_dead(self, places: Iterable[int], drop: Callable[[int], None]) -> None:
        """Call `drop` for each of these places whose frontend is gone. Nobody takes the place meanwhile."""
        for place in places:
            if place != self.own and self._set_lock(place, fcntl.F_WRLCK):
                drop(place)
                self.unlock(place)

    def _claim(self) -> int:
        """Take the first place that no living frontend has."""
        claiming = self.lock(_CLAIM_LOCK)
        free = [place for place in range(PLACES) if self._set_lock(place, fcntl.F_WRLCK)]
        own = free[0] if free else PLACES - 1
        for place in free:
            # Of a frontend that was killed.
            self.map[place] = 0
            if place != own:
                self.unlock(place)
        self.map[own] = 1
        if claiming:
            self.unlock(_CLAIM_LOCK)
        if self.map[:PLACES].count(1) > 1:
            # One that was alone until now ends what it does without a lock.
            time.sleep(_JOIN_S)
        return own

    def _set_lock(self, at: int, kind: int) -> bool:
        """Take or give up the lock of one byte. Returns whether that was possible at once."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
