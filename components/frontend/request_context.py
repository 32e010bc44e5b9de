"""One HTTP request on its way through the gate, and through vLLM's application to the dispatcher.

The gate makes its context, and puts it into the request's ASGI scope, where all find it that get the scope, and into
the context in which vLLM's application is called, where all find it that are called from there (`request_here`), also
in tasks that begin there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from components.frontend.http.callers import ANYBODY, Caller
from dynamo_local.core.http.asgi import Event, Scope, Send
from dynamo_local.core.messages.routing import RouteRow
from dynamo_local.core.ports import Request
from dynamo_local.core.routing.explanation import ROUTE, NamedWorker, described, header_value
from dynamo_local.core.usage.records import Tally
from dynamo_local.engine.vllm.frontend.request_context import ApplicationContext, current_request

if TYPE_CHECKING:
    # Parts of the context, made by modules that look into it.
    from components.frontend.answers.kept_log import Recording
    from components.frontend.http.usage import Attempts
    from components.frontend.keys.ticket import Ticket

_SCOPE_KEY = "dynamo.request"

_MOST_ROUTES = 16
"""Bound on the assignments that are kept of one request."""


@dataclass(slots=True)
class RequestContext(ApplicationContext):
    """What is known of a request beside its head and body.

    `is_own`: the frontend itself makes it, in the process; nobody leaves it then: it is cancelled. `attempts`: earlier
    ones at the same request, whose use counts once. `recording`: takes what it outputs; None: its answer is not kept.
    `ticket`: what it has taken of its key's limits; None: it has none. `terms`: priority and API key under which its
    submissions go, as the gate has found them, whatever vLLM's server makes of headers and body. `notes`: where it
    goes is noted there; None: nobody asks. `deferral`: keeps its submissions; None: they go at once.
    """

    caller: Caller = ANYBODY
    is_own: bool = False
    attempts: Attempts | None = None
    recording: Recording | None = None
    ticket: Ticket | None = None
    terms: tuple[int, str] | None = None
    notes: RouteNotes | None = None
    deferral: Deferral | None = None

    def charge(self, request: Request) -> str | None:
        """Charge a submission to the limits of the key. Returns why it is refused, if so."""
        return None if self.ticket is None or self.ticket.has_ended else self.ticket.charge(request)

    def prioritized(self, request: Request) -> Request:
        """Return a submission with priority and key of the HTTP request that it belongs to; its own, if it has none."""
        if self.terms is None or self.terms == (request.priority, request.key):
            return request
        priority, key = self.terms
        return structs.replace(request, priority=priority, key=key)

    def submit(self, submit: Callable[[], None]) -> None:
        """Submit now, or when the call of the application may go on."""
        if self.deferral is None:
            submit()
        else:
            self.deferral.take(submit)


class Within:
    """Has what is called within its context know the request; no generator, since each request enters it."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: RequestContext) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = current_request.set(self._request)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_request.reset(self._token)


def request_here() -> RequestContext:
    """Return the request in whose context this is called; an empty one, if there is none."""
    found = current_request.get()
    return found if isinstance(found, RequestContext) else RequestContext()


def request_of(scope: Scope) -> RequestContext:
    """Return the context of a request. Until the gate has noted one, it is anybody's."""
    found: RequestContext | None = scope.get(_SCOPE_KEY)
    if found is None:
        found = scope[_SCOPE_KEY] = RequestContext()
    return found


def note_request(scope: Scope, request: RequestContext) -> None:
    """Have everything that gets the request find its context."""
    scope[_SCOPE_KEY] = request


def caller_of(scope: Scope) -> Caller:
    """Return who asks."""
    return request_of(scope).caller


def tally_of(scope: Scope) -> Tally:
    """Return the tally of a request. An empty one, which counts nothing, if the request is not metered."""
    return request_of(scope).tally or Tally()


class Deferral:
    """Keeps what one call of an application submits, until it is released: so the application examines a request before
    it is held. `reached`: set with the first submission."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._kept: list[Callable[[], None]] | None = []

    def take(self, submit: Callable[[], None]) -> None:
        """Submit now, or when released."""
        self.reached.set()
        if self._kept is None:
            submit()
        else:
            self._kept.append(submit)

    def release(self) -> None:
        """Submit what was kept, and everything that comes at once."""
        kept, self._kept = self._kept or [], None
        for submit in kept:
            submit()


class RouteNotes:
    """The assignments of one HTTP request, as far as they are known: told in a header of its answer, if its client asks
    for that and may know it."""

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
