"""The file in which all frontends of a server count together, and the place that each of them has there.

    place p of a frontend           byte p: 1 if it is taken; locked by the frontend as long as it lives
    when the keys changed last      a number (state/limits_file.py)
    from HEAD on                    what is counted: of keys (below), of models (rooms.py)

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
from enum import Enum, auto
from pathlib import Path

from dynamo_local.core.http.bounds.limits import give_back, take
from dynamo_local.core.keys.registry import MOST_KEYS
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.log_once import LogOnce
from state.files import FILE_MODE, make_private_directory, system_errors
from state.limits_file import CHANGED_AT

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


# What all frontends of a server count against the limits of keys.
#
# slot s of a key                 number of the key, paid-at of requests, paid-at of tokens, in flight by place

_SLOT_LOCKS = 1024
_COUNTS = struct.Struct(f"={PLACES}I")
_WORD = 8
_FIRST = HEAD // _WORD
"""Where the first row begins. Like all that follows in words, of eight bytes."""
_REQUESTS, _TOKENS, _IN_FLIGHT = 1, 2, 3
"""Where a row has these; its key's number comes first."""
_ROW = _IN_FLIGHT + PLACES // 2
KEYS_END = HEAD + MOST_KEYS * _ROW * _WORD
"""Where the keys' part of the file ends, in bytes."""


class Denial(Enum):
    """Which limit has refused a request."""

    AT_ONCE = auto()
    A_MINUTE = auto()


class Counters:
    """The counters, for one frontend. To be used by its event loop alone."""

    def __init__(self, places: Places) -> None:
        self.places, self._map = places, places.map
        whole = memoryview(self._map)
        self._numbers, self._times, self._counts = whole.cast("Q"), whole.cast("d"), whole.cast("I")
        self._views = (self._numbers, self._times, self._counts, whole)
        self._alone = self._locked = False
        self._own_count = 2 * _IN_FLIGHT + places.own
        # What was in flight with the last frontend that had the place.
        for slot in range(MOST_KEYS):
            self._counts[2 * (_FIRST + slot * _ROW) + self._own_count] = 0

    def close(self) -> None:
        """Count no more: the file can be closed then."""
        for view in self._views:
            view.release()

    def admit(self, key: ApiKey, now: float) -> Denial | None:
        """Count a request as in flight, and as one of its minute, if the key's limits allow both."""
        row = self._hold(key)
        try:
            at_once, per_minute = key.requests_at_once, key.requests_per_minute
            if at_once is not None and self._in_flight(row) >= at_once and not self._has_room(row, at_once):
                return Denial.AT_ONCE
            if per_minute is not None:
                paid_at = take(self._times[row + _REQUESTS], now, 1, per_minute)
                if paid_at is None:
                    return Denial.A_MINUTE
                self._times[row + _REQUESTS] = paid_at
            self._counts[2 * row + self._own_count] += 1
            return None
        finally:
            if self._locked:
                self._let_go(key)

    def take_tokens(
        self, key: ApiKey, per_minute: int, amount: int, now: float, *, forced: bool = False
    ) -> float | None:
        """Take so many of the tokens a minute; `forced`: in any case. Returns the number that is kept then; None: the
        limit does not allow it."""
        at = self._hold(key) + _TOKENS
        try:
            paid_at = take(self._times[at], now, amount, per_minute, forced=forced)
            if paid_at is not None:
                self._times[at] = paid_at
            return paid_at
        finally:
            if self._locked:
                self._let_go(key)

    def leave(self, key: ApiKey, unused: int, taken_until: float, now: float) -> None:
        """Count a request as in flight no more, and give back tokens that it has taken and not used
        (core/keys/limits.give_back); below 0: it has used more."""
        row, per_minute = self._hold(key), key.tokens_per_minute
        try:
            own = 2 * row + self._own_count
            # Below: another key had the slot meanwhile.
            if (count := self._counts[own]) > 0:
                self._counts[own] = count - 1
            if unused and per_minute is not None:
                paid_at = self._times[row + _TOKENS]
                if unused > 0:
                    self._times[row + _TOKENS] = give_back(paid_at, now, unused, per_minute, taken_until)
                else:
                    self._times[row + _TOKENS] = take(paid_at, now, -unused, per_minute, forced=True) or 0.0
        finally:
            if self._locked:
                self._let_go(key)

    def give_back_request(self, key: ApiKey, now: float) -> None:
        """Give back a request that was counted as one of its minute just now."""
        row, per_minute = self._hold(key) + _REQUESTS, key.requests_per_minute
        try:
            if per_minute is not None:
                paid_at = self._times[row]
                self._times[row] = give_back(paid_at, now, 1, per_minute, paid_at)
        finally:
            if self._locked:
                self._let_go(key)

    def paid_at(self, key: ApiKey) -> tuple[float, float]:
        """The numbers that are kept of the key's requests and tokens a minute."""
        row = _FIRST + key.slot * _ROW
        if self._numbers[row] != key.number:
            return 0.0, 0.0
        return self._times[row + _REQUESTS], self._times[row + _TOKENS]

    def keys_changed(self) -> bytes:
        """What is another value after each change of the registry of keys."""
        return self._map[CHANGED_AT : CHANGED_AT + 8]

    def _has_room(self, row: int, at_once: int) -> bool:
        self._drop_dead(row)
        return self._in_flight(row) < at_once

    def _in_flight(self, row: int) -> int:
        """Requests in flight; of frontends that are not there any more, only those that others may not know to be."""
        return self._counts[2 * row + self._own_count] if self._alone else sum(self._counts_of(row))

    def _counts_of(self, row: int) -> tuple[int, ...]:
        return _COUNTS.unpack_from(self._map, _WORD * (row + _IN_FLIGHT))

    # Rows and locks

    def _hold(self, key: ApiKey) -> int:
        """Hold the lock of a key's slot. Returns where its row begins, which is made anew if another key had it."""
        self._alone = self.places.alone
        self._locked = not self._alone and self.places.lock(_SLOT_LOCKS + key.slot)
        row = _FIRST + key.slot * _ROW
        if self._numbers[row] != key.number:
            self._map[_WORD * row : _WORD * (row + _ROW)] = key.number.to_bytes(_WORD, "little") + bytes(
                _WORD * (_ROW - 1)
            )
        return row

    def _let_go(self, key: ApiKey) -> None:
        self._locked = False
        self.places.unlock(_SLOT_LOCKS + key.slot)

    def _drop_dead(self, row: int) -> None:
        """Drop what is in flight with frontends that are gone."""

        def drop(place: int) -> None:
            self._counts[2 * (row + _IN_FLIGHT) + place] = 0

        self.places.drop_dead((place for place, count in enumerate(self._counts_of(row)) if count), drop)
