"""Follows a running graph for `dynamo top`: connects its sources and produces views."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import FRONTEND_ROLE, PREFILL_ROLE, Change, Happened
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.messages.events import Event
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.graph_watch import GraphWatch
from dynamo_local.monitor.queue_lengths import QueueLengths
from dynamo_local.monitor.rates import Rates
from dynamo_local.monitor.scraping import FrontendReader, ReadFigures
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
        bus: Bus,
        namespace: str,
        events: Callable[[], Iterable[Event]] = tuple,
        board: Callable[[], Board | None] = lambda: None,
    ) -> None:
        """`events` returns the events since its last call, `board` the board of endpoints. Both may read a file."""
        subjects = Subjects(namespace)
        self._bus = bus
        self._new_events = events
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._namespace = namespace
        self._board = board
        self._fleet = FleetWatch(bus, subjects, everywhere=True)
        self._graph = GraphWatch(bus, subjects, self._fleet)
        self._rates = Rates()
        self._reader = FrontendReader()
        self._queues = QueueLengths(bus, namespace, self._with_queues)
        self._figures: ReadFigures | None = None
        self._tasks = TaskGuard()

    async def start(self) -> None:
        """Start to follow the server in background tasks."""
        self._fleet.subscribe(self._on_change)
        await self._graph.start()
        await self._fleet.start()
        self._tasks.spawn("fleet", self._fleet.run())
        self._tasks.spawn("queue length", self._graph.follow_queue())
        self._tasks.spawn("queue lengths of endpoints", self._queues.follow())
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
        snapshot, events = self._graph.snapshot(), recent(self._events)
        return view_of(
            self._namespace,
            snapshot,
            self._rates,
            self._figures,
            events,
            connected=self._bus.connected,
            board=self._board(),
            queues=self._queues.lengths,
        )

    def _with_queues(self) -> set[str]:
        """The revisions of endpoints that have prefill workers, and so a queue."""
        prefill = (parse_watcher(p.watcher) for p in self._fleet.view.members() if p.role == PREFILL_ROLE)
        return {watcher.revision for watcher in prefill if watcher.revision}

    def _on_change(self, change: Change) -> None:
        if change.what is Happened.LEFT:
            self._rates.forget(change.presence.lease)
        else:
            note_counts(self._rates, change.presence, time.monotonic())

    async def _follow_frontend(self) -> None:
        while True:
            url = next((p.url for p in self._fleet.view.members() if p.role == FRONTEND_ROLE and p.url), None)
            began = time.monotonic()
            self._figures = None if url is None else await self._reader.read(url, began)
            # With many models the text is long, and takes the frontend's time from its requests.
            await asyncio.sleep(max(REFRESH_S / 2, _READ_SHARE * (time.monotonic() - began)))
