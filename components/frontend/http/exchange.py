"""A request that generates: the way to its client, which may be answered early, and the call of the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import msgspec

from components.frontend.http.incoming import replayed
from components.frontend.http.outgoing import Outgoing, Renaming, stream_headers
from components.frontend.request_context import Deferral, request_of
from dynamo_local.core.http.asgi import App, Event, Receive, Scope, Send, begins_event_stream
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.conversations import conversation_of
from dynamo_local.core.http.dialects import comment, error_event
from dynamo_local.core.http.json_text import boolean
from dynamo_local.core.http.waiting import COMMENT_EVERY_S
from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.engine.vllm.frontend.request_context import current_request
from dynamo_local.tasks import unless

WOKEN, HELD_S = b"x-dynamo-woken", b"x-dynamo-held-s"
"""Headers of answers to requests that were held: how the model's endpoint was idle, and for how many seconds."""

CACHE, DROPPED = b"x-dynamo-cache", b"dropped"
"""Header of answers to conversations of which no worker has kept what was cached."""

_DISCONNECT = "http.disconnect"

_SILENT = nullcontext()


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


RETRY_NO_WORKER_S = 2
"""Seconds until a client that was refused for want of a worker may ask again."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request that generates. `fields`: of its body. `streams`: it asks for a stream of events."""

    scope: Scope
    body: bytes
    fields: dict[str, Any]
    streams: bool
    priority: int = 0
    key: str = ""
    """The API key that it came with; empty: none."""

    @property
    def priority_class(self) -> PriorityClass:
        """The class of its priority."""
        return class_of(self.priority)

    @property
    def conversation(self) -> int | None:
        """The conversation that it belongs to, as `core.http.conversations` recognises it."""
        return conversation_of(self.fields)

    @property
    def model(self) -> str | None:
        """The model that it names."""
        name = self.fields.get("model")
        return name if isinstance(name, str) else None

    @property
    def searches_beams(self) -> bool:
        """Whether the answer is the best of many that engines begin, each token of them as a request of its own."""
        return boolean(self.fields.get("use_beam_search")) is True


class Exchange(msgspec.Struct, frozen=True):
    """A request and the way to its client. `after_body` gives what comes after the body. `renaming`: of settings, in
    answers."""

    request: GenerationRequest
    after_body: Receive
    early: EarlyAnswer
    renaming: Renaming

    def receive(self) -> Receive:
        """Return a `receive` for an application, which begins with the body."""
        return replayed(self.request.body, self.after_body)

    def send(self) -> Send:
        """Return a `send` for an application."""
        return Outgoing(self.early, self.renaming, RETRY_NO_WORKER_S)


def unavailable(why: str, *, retry_s: int | None = RETRY_NO_WORKER_S) -> Refusal:
    """Return the refusal of a request that may be sent again in `retry_s` seconds; None: that helps nothing."""
    return Refusal(503, why, "ServiceUnavailableError", retry_after_s=retry_s)


# Calls of applications that can be ended: those of the frontend's own requests, and those that begin before their
# model has a worker, so that what is wrong with them is known first.

_END_S = 5.0
"""Longest wait for a call whose client has gone, in seconds."""


class ApplicationCall:
    """A call of an application in a task of its own, ended with the context at the latest.

    It is ended as if its client had gone: vLLM's application has engines go on with a request whose call is merely
    cancelled.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self._from_client, self._to_client = receive, send
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._run(scope), name=f"call of {scope['path']}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def answered(self) -> None:
        """Wait for the answer. Raises what the application raises."""
        await asyncio.shield(self.task)

    async def end(self) -> None:
        """End the call if it is under way. What it answers or raises then concerns nobody any more."""
        self._ended.set()
        self.task.add_done_callback(_forget)
        await asyncio.wait({self.task}, timeout=_END_S)
        self.task.cancel()

    async def _run(self, scope: Scope) -> None:
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> Event:
        events: list[Event] = []

        async def take() -> None:
            events.append(await self._from_client())

        await unless(self._ended.wait(), take())
        return events[0] if events else {"type": "http.disconnect"}

    async def _send(self, event: Event) -> None:
        if not self._ended.is_set():
            await self._to_client(event)


class EarlyCall(ApplicationCall):
    """A call of an application that goes on to a worker only when it is told to.

    `task` ends with the call's answer: before anything was submitted, if that is a refusal.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._deferral = Deferral()
        super().__init__(app, scope, receive, send)

    async def examined(self) -> bool:
        """Wait until the application has examined the request. Returns False if it has answered it instead."""
        reached = asyncio.create_task(self._deferral.reached.wait(), name="examination of a request")
        try:
            await asyncio.wait({self.task, reached}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
        return not self.task.done()

    def go_on(self) -> None:
        """Submit to workers what the application has submitted so far, and will."""
        self._deferral.release()

    async def _run(self, scope: Scope) -> None:
        # For this task, and tasks that it begins.
        current_request.set(replace(request_of(scope), deferral=self._deferral))
        await super()._run(scope)


async def pass_on(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Have an application answer a request."""
    if not request_of(scope).is_own:
        # Its client tells the application itself that it leaves, and a task would cost as much as the gate.
        await app(scope, receive, send)
        return
    async with ApplicationCall(app, scope, receive, send) as call:
        await call.answered()


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
