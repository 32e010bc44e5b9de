"""What all frontends of a server have under way, in the file that they share (places.py): limits hold for all together.

    the server     connections, requests under way, connections for which there was no room, 1 if connections are
                   accepted: each by place
    room of a model, in any row       number of the model, then by class and place: sequences in flight or held,
                                      requests that are held

Each frontend writes at its own place alone. It adds only under one lock, which it keeps from its look at what the
others have until it has added, so that a limit is never passed. A row is a model's as long as something is counted
in it. Whose it is stands in tables of their own.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

from components.frontend.limits.places import KEYS_END, PLACES, SIZE, Places
from dynamo_local.core.priority.classes import MARK_BYTES, PriorityClass, ahead_of, class_of, mark_of

# Whose requests frontends have under way: keys have shares of all together.
#
#     table of a place    number of entries; entries: model, key, and by class: sequences in flight or held, requests
#                         that are held
#
# Each frontend writes the table of its own place alone, from what it remembers itself, and reads those of the others.
# What it reads need not be so: a table that makes no sense is as if it were empty until its frontend has written next.

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
END = KEYS_END + PLACES * _TABLE
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
        return KEYS_END + place * _TABLE


MOST_MODELS = 512
"""Models with something under way at the same time. What is under way for further ones counts in its frontend alone."""

_LOCK = 1022
_WORD = 4
_SERVER = END // _WORD
"""Where the server's counts begin. Like all that follows in words, of four bytes."""
_CONNECTIONS, _UNDER_WAY, _CROWDED, _ACCEPTS = (_SERVER + kind * PLACES for kind in range(4))
_ROWS = _SERVER + 4 * PLACES
_CLASSES = len(PriorityClass)
_NUMBER = MODEL_BYTES // _WORD
"""Words of a row's number."""
_SEQUENCES, _HELD = _NUMBER, _NUMBER + _CLASSES * PLACES
_ROW = _NUMBER + 2 * _CLASSES * PLACES
_KINDS = range(_NUMBER, _ROW, PLACES)
"""Where a row has its counts."""
_EMPTY = bytes(_WORD * (_ROW - _NUMBER))

assert (_ROWS + MOST_MODELS * _ROW) * _WORD <= SIZE, "the file is too small"


class Count:
    """What all frontends have under way for one model, of one kind. As a part of a bound (`Taken`) it is what the
    other frontends have."""

    def __init__(self, rooms: Rooms, number: bytes, row: int, table: int) -> None:
        """`row`, `table`: which counts of a row, and of an entry by key, are those of this kind."""
        self._rooms = rooms
        self._number = number
        self._row, self._table = row, table

    def add(self, priority: int, key: str, change: int) -> None:
        """Count so much of this frontend's more; negative: less."""
        one = class_of(priority)
        with self._rooms.exclusively():
            self._rooms.add(self._number, self._row + one.rank * PLACES, change)
            self._rooms.keys.add(self._number, mark_of(key), self._table, one, change)

    def ahead(self, one: PriorityClass) -> int:
        """As in Taken."""
        return self._rooms.others(self._number, [self._row + each.rank * PLACES for each in ahead_of(one)])

    def by_key(self, one: PriorityClass) -> Counter[bytes]:
        """As in Taken."""
        return self._rooms.keys.others(self._number, self._table, one)


class Room:
    """What all frontends have under way for one model: `sequences` in flight or held, and requests that are `held`."""

    def __init__(self, rooms: Rooms, number: bytes) -> None:
        """`number`: MODEL_BYTES bytes by which all frontends know the model."""
        self.sequences = Count(rooms, number, _SEQUENCES, SEQUENCES)
        self.held = Count(rooms, number, _HELD, HELD)


class Rooms:
    """What all frontends have under way. To be used by the event loop of its frontend alone."""

    def __init__(self, places: Places) -> None:
        self._places, self._map = places, places.map
        self._whole = memoryview(self._map)
        self._counts = self._whole.cast("I")
        self._holds = self._locked = False
        self._rows: dict[bytes, int] = {}
        self._own: dict[bytes, Counter[int]] = {}
        self.keys = KeyCounts(places)
        for at in (_CONNECTIONS, _UNDER_WAY, _CROWDED, _ACCEPTS):
            self._counts[at + places.own] = 0
        for row in range(MOST_MODELS):
            self._drop(self._row_at(row), places.own)
        self._known_crowded = self._others(_CROWDED)

    def close(self) -> None:
        """Count no more: the file can be closed then."""
        self._counts.release()
        self._whole.release()

    def of(self, model: str) -> Room:
        """The room of a model, which all frontends call so."""
        return Room(self, blake2b(model.encode(), digest_size=_NUMBER * _WORD).digest())

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Let no other frontend add anything meanwhile. Nothing may be awaited within."""
        if self._holds:
            yield
            return
        self._holds, self._locked = True, not self._places.alone and self._places.lock(_LOCK)
        try:
            yield
        finally:
            self._holds = False
            if self._locked:
                self._places.unlock(_LOCK)

    @property
    def under_way(self) -> int:
        """Requests that generate, with all frontends."""
        return self._counts[_UNDER_WAY + self._places.own] + self._others(_UNDER_WAY)

    def note_under_way(self, number: int) -> None:
        """Note how many of them this frontend has."""
        self._counts[_UNDER_WAY + self._places.own] = number

    @property
    def other_connections(self) -> int:
        """Connections that count as those of a client, with the other frontends."""
        return self._others(_CONNECTIONS)

    def note_connections(self, number: int) -> None:
        """Note how many of them this frontend has."""
        self._counts[_CONNECTIONS + self._places.own] = number

    @property
    def own_connections(self) -> int:
        """How many this frontend has."""
        return self._counts[_CONNECTIONS + self._places.own]

    def connections_elsewhere(self) -> list[int]:
        """The connections of each other frontend that accepts."""
        if self._places.alone:
            return []
        return [self._counts[_CONNECTIONS + place] for place in self._living(_ACCEPTS)]

    def note_accepting(self, accepts: bool) -> None:
        """Note whether this frontend accepts connections."""
        self._counts[_ACCEPTS + self._places.own] = accepts

    def note_accepted(self) -> None:
        """Count a connection that has been accepted, until `note_connections`."""
        self.note_connections(self.own_connections + 1)

    def note_given_up(self) -> None:
        """Take back `note_accepted`: the connection was never made."""
        self.note_connections(max(self.own_connections - 1, 0))

    def note_crowded(self) -> None:
        """Have the others end a connection that waits for its client: here there was no room, and none to end."""
        own = _CROWDED + self._places.own
        self._counts[own] = (self._counts[own] + 1) % 2**31

    def crowded_elsewhere(self) -> bool:
        """Whether another frontend has lacked room since the last call."""
        before, self._known_crowded = self._known_crowded, self._others(_CROWDED)
        return self._known_crowded != before

    def others(self, number: bytes, kinds: Sequence[int]) -> int:
        """The sum of these counts of a model, of all other frontends."""
        row = None if self._places.alone else self._found(number)
        return 0 if row is None else sum(self._others(row + kind) for kind in kinds)

    def add(self, number: bytes, kind: int, change: int) -> None:
        """Change a count of this frontend's, which remembers them: what it writes is right whatever was there."""
        counts = self._own.setdefault(number, Counter())
        counts[kind] = max(0, counts[kind] + change)
        if not counts[kind]:
            del counts[kind]
            if not counts:
                del self._own[number]
        with self.exclusively():
            row = self._found(number)
            if row is None:
                row = self._taken(number) if counts else None
            if row is not None:
                for each in _KINDS:
                    self._counts[row + each + self._places.own] = counts[each]

    def _others(self, at: int) -> int:
        """The sum of a count over the places of all other living frontends."""
        return sum(self._counts[at + place] for place in self._living(at))

    def _living(self, at: int) -> list[int]:
        """The places of all other living frontends where this count is not zero. Those of dead ones become zero."""
        places = [place for place, count in enumerate(self._counts[at : at + PLACES].tolist()) if count]

        def drop(place: int) -> None:
            self._counts[at + place] = 0

        self._places.drop_dead(places, drop)
        return [place for place in places if place != self._places.own and self._counts[at + place]]

    def _found(self, number: bytes) -> int | None:
        """Where a model's row is."""
        row = self._rows.get(number)
        if row is not None and self._number(row) == number:
            return row
        rows = map(self._row_at, range(MOST_MODELS))
        return self._kept(number, next((row for row in rows if self._number(row) == number), None))

    def _taken(self, number: bytes) -> int | None:
        """Make a row in which nothing is counted the model's."""
        empty = [row for row in map(self._row_at, range(MOST_MODELS)) if self._is_empty(row)]
        unused = (row for row in empty if self._number(row) == bytes(_NUMBER * _WORD))
        row = next(unused, empty[0] if empty else None)
        if row is not None:
            self._map[row * _WORD : (row + _NUMBER) * _WORD] = number
        return self._kept(number, row)

    def _kept(self, number: bytes, row: int | None) -> int | None:
        if row is None:
            self._rows.pop(number, None)
        else:
            self._rows[number] = row
        return row

    def _number(self, row: int) -> bytes:
        return self._map[row * _WORD : (row + _NUMBER) * _WORD]

    def _is_empty(self, row: int) -> bool:
        return self._map[(row + _NUMBER) * _WORD : (row + _ROW) * _WORD] == _EMPTY

    def _drop(self, row: int, place: int) -> None:
        for kind in _KINDS:
            self._counts[row + kind + place] = 0

    @staticmethod
    def _row_at(index: int) -> int:
        return _ROWS + index * _ROW
