"""Requests that are held: the line of each model, the client that may leave, and the answer that begins early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from components.frontend.http.outgoing import stream_headers
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.http.asgi import Event, Receive, Send, begins_event_stream
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.dialects import comment, error_event
from dynamo_local.core.http.waiting.holding import COMMENT_EVERY_S, Held
from dynamo_local.core.priority.fair_queue import Claim, in_turn
from dynamo_local.core.priority.occupancy import Occupancy

WOKEN, HELD_S = b"x-dynamo-woken", b"x-dynamo-held-s"
"""Headers of answers to requests that were held: how the model's endpoint was idle, and for how many seconds."""

CACHE, DROPPED = b"x-dynamo-cache", b"dropped"
"""Header of answers to conversations of which no worker has kept what was cached."""

_DISCONNECT = "http.disconnect"

_SILENT = nullcontext()

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Line:
    """The requests that are held for one model."""

    def __init__(self) -> None:
        self._waiting: dict[Held, asyncio.Future[None] | None] = {}
        self.sequences, self.requests = Occupancy(), Occupancy()
        """How many are held, by class and key."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Held]:
        """The requests, the oldest first."""
        return list(self._waiting)

    def join(self, held: Held) -> None:
        """Count a request as held."""
        self._waiting[held] = None
        self._count(held, 1)

    def leave(self, held: Held) -> None:
        """Count it no more."""
        del self._waiting[held]
        self._count(held, -1)

    def _count(self, held: Held, times: int) -> None:
        self.sequences.add(held.priority, held.key, times * held.sequences)
        self.requests.add(held.priority, held.key, times)

    def wake(self) -> None:
        """Have all requests look again, in the order in which an engine would serve them."""
        for held in in_turn(self._waiting, _claim, lambda held: held.sequences):
            if (future := self._waiting[held]) is not None and not future.done():
                future.set_result(None)

    async def wait(self, held: Held, ends: Collection[asyncio.Future[None]], timeout_s: float) -> None:
        """Wait until the line is woken, one of `ends` is done, or the time is over."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[held] = future
        try:
            await asyncio.wait({future, *ends}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting[held] = None


def _claim(held: Held, number: int) -> Claim:
    return Claim(held.priority, held.since, number, held.key)


class HoldTimes:
    """How long requests were held, by model, by how its endpoint was idle, and by what became of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Histogram] = {}

    @property
    def histograms(self) -> Mapping[tuple[str, str, str], Histogram]:
        """Seconds by (model, "parked", "asleep" or "no", "served", "refused" or "left")."""
        return self._found

    def note(self, model: str, woken_from: str, outcome: str, held_s: float) -> None:
        """Count a request that is held no more."""
        series = model, woken_from or "no", outcome
        self._found.setdefault(series, Histogram(_BOUNDS_S)).observe(held_s)


@contextmanager
def watched(receive: Receive) -> Iterator[asyncio.Future[None]]:
    """Watch a client that has sent its whole request. Gives a future that is done when the client has gone."""

    async def watch() -> None:
        while (await receive())["type"] != _DISCONNECT:
            pass

    # What is cancelled here loses no event: servers tell of a disconnection again whenever they are asked.
    gone = asyncio.create_task(watch(), name="client of a held request")
    try:
        yield gone
    finally:
        gone.cancel()


class EarlyAnswer:
    """An ASGI `send` for one answer, a stream of events, that may begin before its application is asked.

    Once it has begun, what the application answers becomes a part of it: its events as they are, anything else as an
    event with the error. `path`: of the request.
    """

    def __init__(self, send: Send, path: str, *, every_s: float = COMMENT_EVERY_S) -> None:
        self._send = send
        self._path = path
        self._every_s = every_s
        self._commenting: asyncio.Task[None] | None = None
        self._instead: bytearray | None = None
        """The body of an answer that is no stream of events, as far as it has come."""
        self._status = 0
        """The status of such an answer."""
        self.has_begun = False
        self._is_answered = False
        """Whether the application has begun the answer itself."""
        self._headers: list[tuple[bytes, bytes]] = []
        """Headers beside those of the application, as far as they are known when the answer begins."""
        self._is_cold = False
        self._held = ""
        """What the client of an answer that has begun is told of the hold when that is over."""

    async def tell(self, text: str) -> None:
        """Send a comment. The first begins the answer. Nothing is sent if the application has begun it."""
        if self._is_answered:
            return
        if not self.has_begun:
            self.has_begun = True
            # As vLLM begins a stream.
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *self._all_headers()]
            headers = stream_headers(headers)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": comment(text), "more_body": True})

    def note_woken(self, woken_from: str) -> None:
        """Have the answer tell that the model's endpoint was idle so, if it has not begun."""
        self._headers = [(WOKEN, woken_from.encode())] if woken_from else []

    def note_hold(self, woken_from: str, held_s: float) -> None:
        """Have the answer tell of a hold that is over: in headers, or in a comment if it has begun."""
        self.note_woken(woken_from)
        self._headers.append((HELD_S, f"{held_s:.3f}".encode()))
        self._held = f"held for {held_s:.1f} s" + (f"; its endpoint was {woken_from}" if woken_from else "")

    def note_cold(self, is_cold: bool) -> None:
        """Have the answer tell, if it has not begun, whether what was cached of the conversation was dropped."""
        self._is_cold = is_cold

    def commented(self, text: Callable[[], str]) -> AbstractContextManager[None]:
        """Send comments until the first event of an answer that has begun."""
        return self._commented(text) if self.has_begun else _SILENT

    @contextmanager
    def _commented(self, text: Callable[[], str]) -> Iterator[None]:
        self._commenting = asyncio.create_task(self._comment(text), name="comments in a stream")
        try:
            yield
        finally:
            self._silence()

    async def refuse(self, refusal: Refusal) -> Refusal | None:
        """End an answer that has begun with the refusal, and return None; otherwise return the refusal."""
        if not self.has_begun:
            return refusal
        await self._end_with(refusal.status, refusal.body())
        return None

    def __call__(self, event: Event) -> Awaitable[None]:
        """Send an event of the application."""
        if self.has_begun:
            return self._go_on(event)
        self._is_answered = True
        if event["type"] == "http.response.start" and (more := self._all_headers()):
            event = {**event, "headers": [*event["headers"], *more]}
        return self._send(event)

    async def _go_on(self, event: Event) -> None:
        """Send an event of an answer that had begun before."""
        if event["type"] == "http.response.start":
            self._status = event["status"]
            self._instead = None if self._status == 200 and begins_event_stream(event) else bytearray()
        elif self._instead is not None:
            self._instead += event.get("body", b"")
            if not event.get("more_body", False):
                await self._end_with(max(self._status, 400), bytes(self._instead))
        else:
            if event.get("body") or not event.get("more_body", False):
                self._silence()
            await self._send(event)

    def _all_headers(self) -> list[tuple[bytes, bytes]]:
        return [*self._headers, (CACHE, DROPPED)] if self._is_cold else self._headers

    async def _end_with(self, status: int, body: bytes) -> None:
        self._silence()
        event = error_event(self._path, status, body)
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _comment(self, text: Callable[[], str]) -> None:
        if self._held:
            await self.tell(self._held)
        while True:
            await asyncio.sleep(self._every_s)
            await self.tell(text())

    def _silence(self) -> None:
        if self._commenting is not None:
            self._commenting.cancel()
            self._commenting = None
