"""What all frontends of a server count against the limits of keys, in the file that they share (limits/places.py).

slot s of a key                 number of the key, paid-at of requests, paid-at of tokens, in flight by place
"""

from __future__ import annotations

import struct
from enum import Enum, auto

from components.frontend.limits.places import HEAD, PLACES, Places
from dynamo_local.core.keys.limits import give_back, take
from dynamo_local.core.keys.registry import MOST_KEYS
from dynamo_local.core.keys.values import ApiKey
from state.limits_file import CHANGED_AT

_SLOT_LOCKS = 1024
_COUNTS = struct.Struct(f"={PLACES}I")
_WORD = 8
_FIRST = HEAD // _WORD
"""Where the first row begins. Like all that follows in words, of eight bytes."""
_REQUESTS, _TOKENS, _IN_FLIGHT = 1, 2, 3
"""Where a row has these; its key's number comes first."""
_ROW = _IN_FLIGHT + PLACES // 2
END = HEAD + MOST_KEYS * _ROW * _WORD
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
