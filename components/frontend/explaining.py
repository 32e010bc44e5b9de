"""Where an HTTP request went, told in a header of its answer, if its client asks for that and may know it."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dynamo_local.core.http.asgi import Event, Send
from dynamo_local.core.messages.routes import RouteRow
from dynamo_local.core.routing.explanation import ROUTE, NamedWorker, described, header_value

_MOST_ROUTES = 16
"""Bound on the assignments that are kept of one request."""


class RouteNotes:
    """The assignments of one HTTP request, as far as they are known."""

    def __init__(self) -> None:
        self._routes: list[dict[str, Any]] = []

    def note(self, route: RouteRow, name: NamedWorker) -> None:
        """Note an assignment."""
        if len(self._routes) < _MOST_ROUTES:
            self._routes.append(described(route, name))

    def sending(self, send: Send) -> Send:
        """Return an ASGI `send` that adds the header. The answer's beginning waits for its first part, since a stream
        begins before its request has a worker."""
        start: Event | None = None

        async def begin(event: Event) -> None:
            nonlocal start
            begun, start = start, None
            if begun is not None:
                if self._routes:
                    begun = {**begun, "headers": [*begun["headers"], (ROUTE, header_value(self._routes))]}
                await send(begun)
            await send(event)

        async def keep(event: Event) -> None:
            nonlocal start
            start = event

        def send_on(event: Event) -> Awaitable[None]:
            return keep(event) if event["type"] == "http.response.start" else begin(event)

        return send_on


_current: ContextVar[RouteNotes | None] = ContextVar("notes of where this request goes", default=None)


@contextmanager
def explained(notes: RouteNotes) -> Iterator[None]:
    """Have the assignments of what is submitted within noted, also by tasks that begin there."""
    token = _current.set(notes)
    try:
        yield
    finally:
        _current.reset(token)


def current_notes() -> RouteNotes | None:
    """The notes of the HTTP request that this belongs to; None if nobody asks for them."""
    return _current.get()
