"""Requests that the frontend itself makes for a caller, of its own gate, in the process: the lines of batches,
asynchronous tasks, answers that are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from components.frontend.http.callers import Caller
from components.frontend.http.incoming import replayed
from components.frontend.request_context import RequestContext, note_request
from dynamo_local.core.http.asgi import App, Event, Scope
from dynamo_local.core.http.bounds.admission import HEADER_KEY
from dynamo_local.core.http.bounds.limits import NEVER

_log = logging.getLogger(__name__)

_FAULT = b'{"error":{"message":"Internal Server Error","type":"InternalServerError","param":null,"code":500}}'

AGAIN = frozenset({408, 429, 502, 503, 504})
"""Statuses of answers that are no result: the same request may be answered later."""

UNKNOWN_MODEL_S = 120.0
"""Time for which the model of a request may be unknown: after a restart, endpoints come one by one."""

FAULTS = 3
"""Answers that are the server's fault (500) after which a request has failed."""

_BACKOFF_S, _MOST_BACKOFF_S = 0.25, 30.0


class Answered(NamedTuple):
    """A whole answer. `is_final`: it says that the same request can never be granted (x-should-retry: false)."""

    status: int
    body: bytes
    is_final: bool = False


def backoff_s(tries: int) -> float:
    """Return for how long to wait after so many answers that are no result."""
    return min(_MOST_BACKOFF_S, _BACKOFF_S * float(1 << min(tries, 10)))


async def ask(app: App, caller: Caller, path: str, body: bytes, priority: int) -> Answered:
    """Ask for this caller, at this priority or the best that the key may have, and return the answer. To be cancelled
    if nobody wants it any more. `app` answers requests of the caller that is noted in their scope."""
    best = None if caller.key is None else caller.key.best_priority
    allowed = max(priority, best) if best is not None else priority
    extra = [(b"content-length", str(len(body)).encode()), (HEADER_KEY, str(allowed).encode())]
    whole = _Whole()
    try:
        await app(
            own_scope(path, RequestContext(caller=caller, is_own=True), extra), replayed(body, nothing_more), whole.send
        )
    except Exception:  # noqa: BLE001
        # The boundary of a request: what is wrong with one must not end what it is a part of.
        _log.exception("a request to %s could not be answered", path)
        return Answered(500, _FAULT)
    return Answered(whole.status or 500, bytes(whole.answer) or _FAULT, whole.is_final)


class _Whole:
    """Takes an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.is_final = False
        self.answer = bytearray()

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.is_final = NEVER[0] in map(tuple, event.get("headers", ()))
        else:
            self.answer += event.get("body", b"")


def own_scope(path: str, context: RequestContext, headers: Iterable[tuple[bytes, bytes]]) -> Scope:
    """Return the scope of a POST request with a body of JSON, in which its context is noted."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": None,
        "server": None,
        "state": {},
    }
    note_request(scope, context)
    return scope


async def nothing_more() -> Event:
    """Wait like a client that neither sends more nor leaves."""
    return await asyncio.Future[Event]()
