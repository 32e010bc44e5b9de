"""Requests that are held: the line of each model, the client that may leave, and the answer that begins early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from components.frontend.http.outgoing import with_stream_headers
from dynamo_local.core.http.admission import Refusal
from dynamo_local.core.http.asgi import Event, Receive, Send, begins_event_stream
from dynamo_local.core.http.event_streams import comment, error_event
from dynamo_local.core.http.holding import COMMENT_EVERY_S, Held

_DISCONNECT = "http.disconnect"


class Line:
    """The requests that are held for one model, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[Held, asyncio.Future[None] | None] = {}
        self.sequences = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, held: Held) -> None:
        """Count a request as held."""
        self._waiting[held] = None
        self.sequences += held.sequences

    def leave(self, held: Held) -> None:
        """Count it no more."""
        del self._waiting[held]
        self.sequences -= held.sequences

    def wake(self) -> None:
        """Have all requests look again, in the order in which they came."""
        for future in self._waiting.values():
            if future is not None and not future.done():
                future.set_result(None)

    async def wait(self, held: Held, gone: asyncio.Future[None], timeout_s: float) -> None:
        """Wait until the line is woken, the client has gone, or the time is over."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[held] = future
        try:
            await asyncio.wait({future, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting[held] = None


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
        self.has_begun = False

    async def tell(self, text: str) -> None:
        """Send a comment. The first begins the answer."""
        if not self.has_begun:
            self.has_begun = True
            # As vLLM begins a stream.
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await with_stream_headers(self._send)({"type": "http.response.start", "status": 200, "headers": [kind]})
        await self._send({"type": "http.response.body", "body": comment(text), "more_body": True})

    @contextmanager
    def commented(self, text: Callable[[], str]) -> Iterator[None]:
        """Send comments until the first event of an answer that has begun."""
        if self.has_begun:
            self._commenting = asyncio.create_task(self._comment(text), name="comments in a stream")
        try:
            yield
        finally:
            self._silence()

    async def refuse(self, refusal: Refusal) -> Refusal | None:
        """End an answer that has begun with the refusal, and return None; otherwise return the refusal."""
        if not self.has_begun:
            return refusal
        await self._end_with(refusal.body())
        return None

    async def __call__(self, event: Event) -> None:
        """Send an event of the application."""
        if not self.has_begun:
            await self._send(event)
        elif event["type"] == "http.response.start":
            self._instead = None if event["status"] == 200 and begins_event_stream(event) else bytearray()
        elif self._instead is not None:
            self._instead += event.get("body", b"")
            if not event.get("more_body", False):
                await self._end_with(bytes(self._instead))
        else:
            if event.get("body") or not event.get("more_body", False):
                self._silence()
            await self._send(event)

    async def _end_with(self, body: bytes) -> None:
        self._silence()
        await self._send({"type": "http.response.body", "body": error_event(self._path, body), "more_body": False})

    async def _comment(self, text: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.tell(text())

    def _silence(self) -> None:
        if self._commenting is not None:
            self._commenting.cancel()
            self._commenting = None
