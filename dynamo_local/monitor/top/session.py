"""Follows a running graph for `dynamo top`: connects its sources and produces views."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec.structs import replace

from dynamo_local.control.descriptions import FleetLook
from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.presence import as_received
from dynamo_local.monitor.rates import Rates
from dynamo_local.monitor.scraping import FrontendReader, ReadFigures
from dynamo_local.monitor.snapshot import Snapshot
from dynamo_local.monitor.top.view import TopView, note_counts, recent, view_of
from dynamo_local.tasks import TaskGuard

REFRESH_S = 1.0
FIRST_LOOK_S = 2.2
"""Time before a view that is shown only once, in seconds: rates need two readings of a counter."""

_KEPT_EVENTS = 200
"""Events in memory. Repeated ones are counted among these."""


_READ_SHARE = 20
"""A frontend is left alone for so many times as long as it took to answer."""


class TopSession:
    """Follows one server from `start` to `close`."""

    def __init__(
        self,
        namespace: str,
        look: Callable[[], FleetLook],
        events: Callable[[], Iterable[Event]] = tuple,
        board: Callable[[], Board | None] = lambda: None,
    ) -> None:
        """`look` asks the server, `events` returns the events since its last call, `board` the board of endpoints. Each
        may block."""
        self._namespace = namespace
        self._look = look
        self._new_events = events
        self._board = board
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._seen = FleetLook(True, (), (), {}, None)
        self._rates = Rates()
        self._reader = FrontendReader()
        self._figures: ReadFigures | None = None
        self._tasks = TaskGuard()

    async def start(self) -> None:
        """Look for the first time, and go on in background tasks. Raises NotRunningError, SupervisorError."""
        await self._ask()
        self._tasks.spawn("server", self._follow())
        self._tasks.spawn("frontend", self._follow_frontend())

    async def wait(self, seconds: float, unless: asyncio.Event) -> None:
        """Wait for `seconds`, or until the event is set. Raises the error of a background task that has failed."""
        ends = {asyncio.create_task(self._tasks.failed()), asyncio.create_task(unless.wait())}
        done, pending = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in pending:
            end.cancel()
        for end in done:
            end.result()

    async def close(self) -> None:
        """End the background tasks."""
        await self._tasks.close()

    def view(self) -> TopView:
        """Return the view of the present moment."""
        self._events.extend(self._new_events())
        seen = self._seen
        queues = dict(seen.queues)
        snapshot = Snapshot(
            time.monotonic(), seen.members, frozenset(seen.ready), queue=queues.pop("", None), planner=seen.planner
        )
        return view_of(
            self._namespace,
            snapshot,
            self._rates,
            self._figures,
            recent(self._events),
            connected=seen.connected,
            board=self._board(),
            queues=queues,
        )

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            # A server that has ended is told by whoever shows this.
            with suppress(DynamoError):
                await self._ask()

    async def _ask(self) -> None:
        told, now = await asyncio.to_thread(self._look), time.monotonic()
        seen = replace(told, members=tuple(as_received(each, now) for each in told.members))
        for lease in {each.lease for each in self._seen.members} - {each.lease for each in seen.members}:
            self._rates.forget(lease)
        for each in seen.members:
            note_counts(self._rates, each, now)
        self._seen = seen

    async def _follow_frontend(self) -> None:
        while True:
            url = next((p.url for p in self._seen.members if p.role == FRONTEND_ROLE and p.url), None)
            began = time.monotonic()
            self._figures = None if url is None else await self._reader.read(url, began)
            # With many models the text is long, and takes the frontend's time from its requests.
            await asyncio.sleep(max(REFRESH_S / 2, _READ_SHARE * (time.monotonic() - began)))
