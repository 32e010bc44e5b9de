"""The board: what frontends are to serve and the planner is to know, as a file and a nudge on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, StateError
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointView, progress_of
from dynamo_local.core.messages.reports import STATE, Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.files import make_private_directory, replace_file

_VIEWS_EVERY_S = 0.5
"""Shortest time between two boards that differ only in what is said about endpoints."""

Contents = Callable[[], tuple[tuple[BoardRevision, ...], tuple[EndpointView, ...]]]
"""The revisions that frontends are to serve, and all endpoints as they are now."""


@dataclass
class BoardWriter:
    """Writes the board of one server. `contents` is asked whenever something may have changed. `record`: is told of
    each endpoint that is another one by now."""

    path: Path
    bus: Bus
    subjects: Subjects
    contents: Contents
    report: Report
    record: Callable[[Event], None]
    board: Board = field(default_factory=Board)
    _told: tuple[EndpointView, ...] = field(default=(), init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._failure = ReportOnce(self.report)

    def touch(self) -> None:
        """Note that the state of an endpoint may have changed: the board follows soon."""
        self._changed.set()

    async def publish(self) -> None:
        """Write the board now if it differs from what is in the file. Raises StateError: the old one is valid then."""
        async with self._lock:
            revisions, endpoints = self.contents()
            self._tell(endpoints)
            board = Board(self.board.number + 1, revisions, endpoints)
            unchanged = (revisions, endpoints) == (self.board.revisions, self.board.endpoints)
            if unchanged and await asyncio.to_thread(_holds, self.path, self.board):
                return
            await asyncio.to_thread(_write, self.path, board)
            self.board = board
        try:
            await self.bus.publish(self.subjects.board, b"")
        except BusError as error:
            # Frontends look at the file now and then as well.
            self.report.step(f"frontends see a changed board of endpoints later: {error}")

    def _tell(self, views: tuple[EndpointView, ...]) -> None:
        """Tell of endpoints that have changed, also while the board cannot be written."""
        before, now = ({view.spec.name: view for view in each} for each in (self._told, views))
        self._told = views
        for name in before.keys() | now.keys():
            if (view := now.get(name)) != before.get(name):
                what = f"{name} is gone" if view is None else progress_of(view)
                self.record(Event(STATE, what, endpoint=name))

    async def run(self) -> None:
        """Publish what has been touched, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.publish()
            except StateError as error:
                self._failure.note(f"the board of endpoints cannot be written: {error}")
                self._changed.set()
            else:
                self._failure.note("")
            await asyncio.sleep(_VIEWS_EVERY_S)


def _holds(path: Path, board: Board) -> bool:
    """Whether the file is there, and nobody has damaged it."""
    try:
        return path.read_bytes() == msgspec.json.encode(board)
    except OSError:
        return False


def _write(path: Path, board: Board) -> None:
    make_private_directory(path.parent)
    replace_file(path, msgspec.json.encode(board), durable=False)
