"""The events of a server (core/messages/reports.py): in a file, which it appends to and `dynamo events` reads, and the
latest ones in memory, for those who follow them through the control API.

It stays when the server ends, and the next server of the namespace continues it. A full file is renamed to `{name}.1`,
in place of an earlier one. Lines that are damaged are skipped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from dynamo_local.core.http.json_text import as_line
from dynamo_local.core.messages.reports import PASSING_KINDS, Event
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce

NOW = "now"
"""In place of an event's id: the last one that there is."""

MAX_PENDING = 10_000
"""Maximum number of events that are kept in memory."""

MAX_BYTES = 2 * 1024 * 1024
"""Maximum size of the file: about ten thousand events."""

RECENT_S = 3600.0
MAX_RECENT = 10_000
"""For how long events are kept in memory for those who follow them, and how many of them at most."""


class Recent(NamedTuple):
    """An event in memory. `number`: 1 for the first event of this server, and so on. `at`: by the monotonic clock."""

    number: int
    at: float
    event: Event


class RecentEvents:
    """The events of the last hour. Ids have the time at which this server began to count, and the number of the event:
    those of another server are told apart. To be used in one thread."""

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`began`: in seconds since 1970."""
        self._began = f"{began * 1000:.0f}"
        self._clock = clock
        self._kept: deque[Recent] = deque(maxlen=MAX_RECENT)
        self._passing: deque[Recent] = deque(maxlen=MAX_RECENT)
        """Events of `PASSING_KINDS`, apart: they are many, and push out no others."""
        self._number = 0
        self._news = asyncio.Event()
        self.ended = False
        """Whether there will be no more events."""

    def add(self, event: Event) -> None:
        """Keep an event, and tell those who wait for one."""
        self._number += 1
        now, kept = self._clock(), self._passing if event.kind in PASSING_KINDS else self._kept
        kept.append(Recent(self._number, now, event))
        while kept[0].at < now - RECENT_S:
            kept.popleft()
        self._tell()

    def end(self) -> None:
        """Have nobody wait any more."""
        self.ended = True
        self._tell()

    def id_of(self, number: int) -> str:
        """Return the id of the event with that number."""
        return f"{self._began}.{number}"

    def number_of(self, event_id: str) -> int:
        """Return the number of the event with that id, or, for "now", of the last one; 0, which is before all, for an
        id of another server, or none."""
        if event_id == NOW:
            return self._number
        began, _, number = event_id.partition(".")
        return int(number) if began == self._began and number.isdecimal() else 0

    def after(self, number: int, passing: bool = False) -> list[Recent]:
        """Return the events after that number, the oldest first; those of `PASSING_KINDS` if they are wanted."""
        rings = (self._kept, self._passing) if passing else (self._kept,)
        return sorted(one for ring in rings for one in takewhile(lambda kept: kept.number > number, reversed(ring)))

    async def changed(self, within_s: float) -> bool:
        """Wait for an event, or for the end. Returns False if the time was over first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._news.wait()
        return False

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass
class EventLog:
    """Appends events to a file, from one process. Those that cannot be written, because the disk is full, are kept and
    written with a later one; this is reported once. `recent`: those of the last hour."""

    path: Path
    report: Report
    max_bytes: int = MAX_BYTES
    wall_clock: Callable[[], float] = time.time
    recent: RecentEvents = field(init=False)
    _pending: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_PENDING), init=False)
    _failure: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._failure = ReportOnce(self.report)
        self.recent = RecentEvents(self.wall_clock())

    def add(self, event: Event) -> None:
        """Append an event; one without a time gets the present one. Those of `PASSING_KINDS` are told alone."""
        dated = event if event.time else replace(event, time=round(self.wall_clock(), 3))
        if event.kind not in PASSING_KINDS:
            # Written by the caller's thread: a line goes to the kernel's cache, and events keep their order.
            self._pending.append(as_line(msgspec.json.encode(dated)))
            self.flush()
        self.recent.add(dated)

    def flush(self) -> None:
        """Write the events that are kept, if there are any."""
        try:
            while self._pending:
                self._append(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            self._failure.note(f"events cannot be written to {self.path}, and are kept: {error.strerror}")
        else:
            self._failure.note("")

    def _append(self, line: bytes) -> None:
        # Opened for each event, because the file may have been removed.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0 or size + len(line) <= self.max_bytes:
                # A line that a crash or a full disk has cut off is ended first, so that it damages no other.
                whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
                line = line if whole else b"\n" + line
                if os.write(descriptor, line) < len(line):
                    # A disk that has become full takes a part.
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
        finally:
            os.close(descriptor)
        self.path.replace(_older(self.path))
        self._append(line)


@dataclass
class EventReader:
    """Reads the events of a file, and then those that are added, also across its renaming and the end of a server."""

    path: Path
    _inode: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)

    def all(self) -> list[Event]:
        """Return the events there are, the oldest first. `new` continues after them."""
        self._inode, self._offset = 0, 0
        latest = self.new()
        older = _read(_older(self.path), 0)
        # The same file: it was renamed between the two reads.
        return latest if older is None or older.inode == self._inode else [*_events(older.data), *latest]

    def new(self) -> list[Event]:
        """Return the events that were added since the last call."""
        found = _read(self.path, self._offset)
        if found is None:
            self._forget_removed()
            return []
        rest = b""
        if found.inode != self._inode:
            older = _read(_older(self.path), self._offset)
            rest = older.data if older is not None and older.inode == self._inode else b""
            found = _read(self.path, 0) or found
            self._offset = 0
        self._inode, self._offset = found.inode, self._offset + len(found.data)
        return [*_events(rest), *_events(found.data)]

    def _forget_removed(self) -> None:
        """Begin with the next file, unless the missing one was just renamed: the next one may have the same inode."""
        older = _read(_older(self.path), self._offset)
        if older is None or older.inode != self._inode:
            self._inode, self._offset = 0, 0


@dataclass(frozen=True)
class _Part:
    """The complete lines of a file from an offset on."""

    inode: int
    data: bytes


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _read(path: Path, offset: int) -> _Part | None:
    """Read complete lines. None if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
            return _Part(os.fstat(file.fileno()).st_ino, data[: data.rfind(b"\n") + 1])
    except FileNotFoundError:
        return None


def _events(data: bytes) -> Iterator[Event]:
    for line in data.split(b"\n"):
        try:
            yield msgspec.json.decode(line, type=Event)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # damaged, or the empty end
