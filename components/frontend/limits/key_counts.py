"""Whose requests frontends have under way, in the file that they share (places.py): keys have shares of all together.

    table of a place    number of entries; entries: model, key, and by class: sequences in flight or held, requests that
                        are held

Each frontend writes the table of its own place alone, from what it remembers itself, and reads those of the others.
What it reads need not be so: a table that makes no sense is as if it were empty until its frontend has written next.
"""

from __future__ import annotations

import struct
from collections import Counter

from components.frontend.keys.counters import END as COUNTERS_END
from components.frontend.limits.places import PLACES, Places
from dynamo_local.core.priority.classes import PriorityClass
from dynamo_local.core.priority.occupancy import MARK_BYTES

MOST_ENTRIES = 1024
"""Keys with something under way at one frontend at the same time, those of each model apart. Of what further ones have,
the other frontends do not know whose it is."""

MODEL_BYTES = 8
SEQUENCES, HELD = 0, len(PriorityClass)
"""Which counts of an entry: the first of each kind."""

_COUNTS = 2 * len(PriorityClass)
_USED = struct.Struct("=Q")
_ENTRY = struct.Struct(f"={MODEL_BYTES}s{MARK_BYTES}s{_COUNTS}I")
_TABLE = _USED.size + MOST_ENTRIES * _ENTRY.size
END = COUNTERS_END + PLACES * _TABLE
"""Where this part of the file ends, in bytes."""

_Name = tuple[bytes, bytes]


class KeyCounts:
    """The tables, for one frontend. To be used by its event loop alone."""

    def __init__(self, places: Places) -> None:
        self._places, self._map = places, places.map
        self._own = self._table_at(places.own)
        self._counts: dict[_Name, list[int]] = {}
        self._names: list[_Name] = []
        """In the order of the entries."""
        self._places_of: dict[_Name, int] = {}
        self._set_used()

    def add(self, model: bytes, key: bytes, kind: int, one: PriorityClass, change: int) -> None:
        """Change a count of this frontend's. `kind`: SEQUENCES or HELD."""
        name = model, key
        counts = self._counts.get(name)
        if counts is None:
            if change <= 0 or len(self._names) == MOST_ENTRIES:
                return
            counts = self._counts[name] = [0] * _COUNTS
            self._places_of[name] = len(self._names)
            self._names.append(name)
        at = kind + one.rank
        counts[at] = max(0, counts[at] + change)
        if any(counts):
            self._write(name)
        else:
            self._remove(name)
        self._set_used()

    def others(self, model: bytes, kind: int, one: PriorityClass) -> Counter[bytes]:
        """What the other frontends have of this class and of higher ones, by key."""
        found = Counter[bytes]()
        if self._places.alone:
            return found
        places = [place for place in range(PLACES) if place != self._places.own and self._used(place)]
        self._places.drop_dead(places, self._drop)
        for place in places:
            begin = self._table_at(place) + _USED.size
            table = self._map[begin : begin + self._used(place) * _ENTRY.size]
            for entry in _ENTRY.iter_unpack(table):
                if entry[0] == model and (number := sum(entry[2 + kind : 3 + kind + one.rank])):
                    found[entry[1]] += number
        return found

    def _remove(self, name: _Name) -> None:
        """Have the last entry take the place of this one."""
        del self._counts[name]
        at, last = self._places_of.pop(name), self._names.pop()
        if last != name:
            self._names[at], self._places_of[last] = last, at
            self._write(last)

    def _write(self, name: _Name) -> None:
        at = self._own + _USED.size + self._places_of[name] * _ENTRY.size
        _ENTRY.pack_into(self._map, at, *name, *self._counts[name])

    def _set_used(self) -> None:
        _USED.pack_into(self._map, self._own, len(self._names))

    def _used(self, place: int) -> int:
        used = int(_USED.unpack_from(self._map, self._table_at(place))[0])
        return used if used <= MOST_ENTRIES else 0

    def _drop(self, place: int) -> None:
        _USED.pack_into(self._map, self._table_at(place), 0)

    @staticmethod
    def _table_at(place: int) -> int:
        return COUNTERS_END + place * _TABLE
