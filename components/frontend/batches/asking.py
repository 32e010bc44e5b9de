"""Requests that the frontend itself makes for the lines of batches: of its own gate, in the process."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from components.frontend.http.body import replayed
from components.frontend.http.callers import Caller
from components.frontend.http.own_requests import nothing_more, own_scope
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send
from dynamo_local.core.http.priority import HEADER_KEY
from dynamo_local.core.stored.batches import BATCH_PRIORITY

_log = logging.getLogger(__name__)

_FAULT = b'{"error":{"message":"Internal Server Error","type":"InternalServerError","param":null,"code":500}}'


class Answered(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


class Gate(Protocol):
    """What answers requests of the frontend itself (components/frontend/http/gate.py)."""

    async def answer_own(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of the caller that is noted in its scope."""


async def ask(gate: Gate, caller: Caller, path: str, body: bytes) -> Answered:
    """Ask for this caller, and return the answer. To be cancelled if nobody wants it any more."""
    best = None if caller.key is None else caller.key.best_priority
    priority = max(BATCH_PRIORITY, best or 0)
    extra = [(b"content-length", str(len(body)).encode()), (HEADER_KEY, str(priority).encode())]
    scope = own_scope(path, caller, extra)
    whole = _Whole()
    try:
        await gate.answer_own(scope, replayed(body, nothing_more), whole.send)
    except Exception:  # noqa: BLE001
        # The boundary of a request: what is wrong with one line must not end the batch.
        _log.exception("a line of a batch could not be answered")
        return Answered(500, _FAULT)
    return Answered(whole.status or 500, bytes(whole.answer) or _FAULT)


class _Whole:
    """Takes an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.answer = bytearray()

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
        else:
            self.answer += event.get("body", b"")
