"""Tells the server what happens to requests, for those who follow its events: which worker has a request, its first
token, its end.

Requests are looked at in intervals, and all that has changed is one message. Of too many new requests some are left
out, from their beginning to their end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.events import REQUEST, Event, RequestNews
from dynamo_local.core.request.log import told_id
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
MOST_NEW = 25
"""New requests that are told of at each look."""


@dataclass
class _Told:
    """What was told of a request. `worker`: the watcher that has it."""

    worker: str = ""
    has_tokens: bool = False


class RequestEvents:
    """The events of the requests of one model. `watcher_of`: the watcher of a worker's lease."""

    def __init__(
        self,
        requests: LiveRequests,
        watcher_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._watcher_of = watcher_of
        self._clock = clock
        self._told: dict[str, _Told | None] = {}
        """By request; None for those that are left out."""
        self._events: list[Event] = []
        self._new = 0
        self._left_out = 0

    def end(self, live: LiveRequest, failed: bool) -> None:
        """Note that a request has ended."""
        self._note(live)
        if self._told.pop(live.request_id) is not None:
            what = "failed" if failed else "ended"
            self._events.append(self._event(live, what, self._clock(), live.log.position))

    def look(self) -> RequestNews | None:
        """Return what has happened since the last look; None if nothing has."""
        for live in self._requests.values():
            self._note(live)
        events, left_out = tuple(self._events), self._left_out
        self._events, self._new, self._left_out = [], 0, 0
        return RequestNews(events, left_out) if events or left_out else None

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Send what happens, until cancelled. A failure is logged: no work depends on it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (news := self.look()) is not None:
                try:
                    await bus.send(subjects.request_news, news)
                except BusError as error:
                    _log.info("what happened to %d requests is not told: %s", len(news.events), error)
            elif not self._requests:
                await self._requests.some()

    def _note(self, live: LiveRequest) -> None:
        if live.request_id not in self._told:
            self._told[live.request_id] = _Told() if self._new < MOST_NEW else None
            self._new += 1
            self._left_out += self._told[live.request_id] is None
        told = self._told[live.request_id]
        if told is not None:
            self._events += self._changes(live, told)

    def _changes(self, live: LiveRequest, told: _Told) -> Iterator[Event]:
        worker = self._worker(live)
        if worker and worker != told.worker:
            what = "its prompt is computed" if live.at_prefill_worker else "is with a worker"
            told.worker = worker
            yield self._event(live, what, self._clock(), live.log.position)
        if live.first_token_at is not None and not told.has_tokens:
            told.has_tokens = True
            yield self._event(live, "first token", live.first_token_at, 1)

    def _worker(self, live: LiveRequest) -> str:
        """The watcher of the worker that has the request; empty if none has, or it is not known any more."""
        return "" if live.log.worker is None else self._watcher_of(live.log.worker)

    def _event(self, live: LiveRequest, what: str, at: float, tokens: int) -> Event:
        request, took_s = told_id(live.request_id), round(at - live.born_at, 4)
        return Event(REQUEST, what, watcher=self._worker(live), request=request, took_s=took_s, tokens=tokens)
