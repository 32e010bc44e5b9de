"""Requests that the frontend itself makes for the lines of batches: of its own gate, in the process."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple, Protocol

from components.frontend.http.callers import Caller, note_caller
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
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (HEADER_KEY, str(priority).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
    note_caller(scope, caller)
    exchange = _Exchange(body)
    try:
        await gate.answer_own(scope, exchange.receive, exchange.send)
    except Exception:  # noqa: BLE001
        # The boundary of a request: what is wrong with one line must not end the batch.
        _log.exception("a line of a batch could not be answered")
        return Answered(500, _FAULT)
    return Answered(exchange.status or 500, bytes(exchange.answer) or _FAULT)


class _Exchange:
    """The two ends of one request. Its client waits for the answer, and never leaves."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.answer = bytearray()

    async def receive(self) -> Event:
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
        else:
            self.answer += event.get("body", b"")
