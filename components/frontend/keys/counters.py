"""What all frontends of a server count against the limits of keys: one file, mapped into each of them.

    place p of a frontend           byte p: 1 if it is taken; locked by the frontend as long as it lives
    when the keys changed last      a number (state/limits_file.py)
    slot s of a key                 number of the key, paid-at of requests, paid-at of tokens, in flight by place

A slot is changed under a lock on one byte, for microseconds; a frontend that is alone needs none. Locks belong to
open files (OFD locks), so the kernel frees those of a frontend that is killed; what was in flight there is dropped by
whoever finds its place unlocked. Nothing here is durable: the file is in the run directory, and an empty one is a fresh
start.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from dynamo_local.core.keys.limits import Taken, give_back, standing, take
from dynamo_local.core.keys.registry import MOST_KEYS
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.log_once import LogOnce
from state.files import FILE_MODE, make_private_directory, system_errors
from state.limits_file import CHANGED_AT

_log = logging.getLogger(__name__)

PLACES = 64
"""Frontends that count at the same time. Further ones share the last place."""

_JOIN_S = 0.05

_HEAD = 4096
_CLAIM_LOCK = 1023
_SLOT_LOCKS = 1024
_NUMBER, _TIME, _COUNT = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<I")
_time_at, _put_time = _TIME.unpack_from, _TIME.pack_into
_COUNTS = struct.Struct(f"<{PLACES}I")
_REQUESTS_AT, _TOKENS_AT, _COUNTS_AT = 8, 16, 24
_ROW = 24 + 4 * PLACES
SIZE = _HEAD + MOST_KEYS * _ROW

_FLOCK = struct.Struct("hhqqi4x")
_ATTEMPTS, _PAUSE_S = 100, 50e-6
"""A holder keeps a slot for microseconds. One that is stopped in between must not stop the others: after these attempts
they go on without the lock, and may miscount what that one had under way."""


class Admitted(NamedTuple):
    """What became of a request. `is_free`: fewer are in flight than may be. `requests`, `tokens`: how the key stands
    with its limits a minute; None: it has no such limit."""

    is_free: bool
    requests: Taken | None
    tokens: Taken | None

    @property
    def granted(self) -> bool:
        """Whether it is counted as in flight."""
        return self.is_free and (self.requests is None or self.requests.granted)


class Counters:
    """The counters, for one frontend. To be used by its event loop alone."""

    def __init__(self, path: Path) -> None:
        """Raises StateError if the file cannot be made."""
        make_private_directory(path.parent)
        with system_errors(f"cannot open {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            # Room for all of it now: a page that the disk has no room for later would kill the process.
            os.posix_fallocate(self._file, 0, SIZE)
            self._map = mmap.mmap(self._file, SIZE)
        self._log_once = LogOnce(_log)
        self._alone = self._locked = False
        self.place = self._claim()
        self._alone_places = bytes(int(place == self.place) for place in range(PLACES))

    def close(self) -> None:
        """Give up the place."""
        self._map[self.place] = 0
        self._map.close()
        os.close(self._file)

    def admit(self, key: ApiKey, now: float) -> Admitted:
        """Count a request as in flight, and as one of its minute, if the key's limits allow both."""
        row = self._hold(key)
        try:
            at_once, requests, tokens = key.requests_at_once, None, None
            is_free = at_once is None or self._in_flight(row) < at_once or self._has_room(row, at_once)
            if key.requests_per_minute is not None:
                at = row + _REQUESTS_AT
                requests = take(_time_at(self._map, at)[0], now, int(is_free), key.requests_per_minute)
                _put_time(self._map, at, requests.paid_at)
            if key.tokens_per_minute is not None:
                tokens = standing(_time_at(self._map, row + _TOKENS_AT)[0], now, key.tokens_per_minute)
            if is_free and (requests is None or requests.retry_s == 0.0):
                self._add(row, 1)
            return Admitted(is_free, requests, tokens)
        finally:
            self._let_go(key)

    def take_tokens(self, key: ApiKey, per_minute: int, amount: int, now: float, *, forced: bool = False) -> Taken:
        """Take so many of the tokens a minute, if the limit allows it; `forced`: in any case."""
        at = self._hold(key) + _TOKENS_AT
        try:
            taken = take(_time_at(self._map, at)[0], now, amount, per_minute, forced=forced)
            _put_time(self._map, at, taken.paid_at)
            return taken
        finally:
            self._let_go(key)

    def leave(self, key: ApiKey, unused: int, taken_until: float, now: float) -> None:
        """Count a request as in flight no more, and give back tokens that it has taken and not used
        (core/keys/limits.give_back); below 0: it has used more."""
        row = self._hold(key)
        try:
            self._add(row, -1)
            if unused and key.tokens_per_minute is not None:
                at = row + _TOKENS_AT
                (paid_at,) = _time_at(self._map, at)
                if unused > 0:
                    paid_at = give_back(paid_at, now, unused, key.tokens_per_minute, taken_until)
                else:
                    paid_at = take(paid_at, now, -unused, key.tokens_per_minute, forced=True).paid_at
                _put_time(self._map, at, paid_at)
        finally:
            self._let_go(key)

    def keys_changed(self) -> bytes:
        """What is another value after each change of the registry of keys."""
        return self._map[CHANGED_AT : CHANGED_AT + 8]

    def _has_room(self, row: int, at_once: int) -> bool:
        self._drop_dead(row)
        return self._in_flight(row) < at_once

    def _in_flight(self, row: int) -> int:
        """Requests in flight; of frontends that are not there any more, only those that others may not know to be."""
        if self._alone:
            (own,) = _COUNT.unpack_from(self._map, row + _COUNTS_AT + 4 * self.place)
            return int(own)
        return sum(_COUNTS.unpack_from(self._map, row + _COUNTS_AT))

    # Rows and locks

    def _add(self, row: int, change: int) -> None:
        at = row + _COUNTS_AT + 4 * self.place
        _COUNT.pack_into(self._map, at, max(0, _COUNT.unpack_from(self._map, at)[0] + change))

    def _hold(self, key: ApiKey) -> int:
        """Hold the lock of a key's slot. Returns the offset of its row, which is made anew if another key had it."""
        self._alone = self._map[:PLACES] == self._alone_places
        self._locked = not self._alone and self._lock(_SLOT_LOCKS + key.slot)
        row = _HEAD + key.slot * _ROW
        if _NUMBER.unpack_from(self._map, row)[0] != key.number:
            self._map[row : row + _ROW] = _NUMBER.pack(key.number) + bytes(_ROW - 8)
        return row

    def _let_go(self, key: ApiKey) -> None:
        if self._locked:
            self._locked = False
            self._set_lock(_SLOT_LOCKS + key.slot, fcntl.F_UNLCK)

    def _lock(self, at: int) -> bool:
        for _ in range(_ATTEMPTS):
            if self._set_lock(at, fcntl.F_WRLCK):
                return True
            time.sleep(_PAUSE_S)
        self._log_once.warn("a frontend does not let go of the limits of a key: it is stopped; limits may be inexact")
        return False

    def _claim(self) -> int:
        """Take the first place that no living frontend has, and drop what was in flight there."""
        claiming = self._lock(_CLAIM_LOCK)
        free = [place for place in range(PLACES) if self._set_lock(place, fcntl.F_WRLCK)]
        own = free[0] if free else PLACES - 1
        for place in free:
            # Of a frontend that was killed.
            self._map[place] = 0
            if place != own:
                self._set_lock(place, fcntl.F_UNLCK)
        self._map[own] = 1
        if claiming:
            self._set_lock(_CLAIM_LOCK, fcntl.F_UNLCK)
        if self._map[:PLACES].count(1) > 1:
            # One that was alone until now ends what it does without a lock.
            time.sleep(_JOIN_S)
        for slot in range(MOST_KEYS):
            _COUNT.pack_into(self._map, _HEAD + slot * _ROW + _COUNTS_AT + 4 * own, 0)
        return own

    def _drop_dead(self, row: int) -> None:
        """Drop what is in flight with frontends that are gone."""
        for place, count in enumerate(_COUNTS.unpack_from(self._map, row + _COUNTS_AT)):
            if count and place != self.place and self._set_lock(place, fcntl.F_WRLCK):
                _COUNT.pack_into(self._map, row + _COUNTS_AT + 4 * place, 0)
                self._set_lock(place, fcntl.F_UNLCK)

    def _set_lock(self, at: int, kind: int) -> bool:
        """Take or give up the lock of one byte. Returns whether that was possible at once."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
