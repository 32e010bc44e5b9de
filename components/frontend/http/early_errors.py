"""Answers errors of streams before their first token with the HTTP status of the error.

The OpenAI server begins a stream with status 200 before the engine has looked at the request. An error before the first
token is then an event in a stream that was called a success. Here the beginning waits for the first event: if that is
an error, the client is answered with its status, as if it had not asked for a stream.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable

from components.frontend.http.answers import JSON, answer
from dynamo_local.core.http.asgi import Event, Send, begins_event_stream

_DATA = b"data: "


def with_early_errors(send: Send) -> Send:
    """Return an ASGI `send` for one answer, which delays the beginning of a stream until its first event."""
    start: Event | None = None
    answered = False

    async def send_late(event: Event) -> None:
        nonlocal start, answered
        if answered:
            return
        if begins_event_stream(event):
            start = event
            return
        if start is not None:
            body = event.get("body", b"")
            if not body and event.get("more_body", False):
                return
            if (error := _error_in(body)) is not None:
                answered = True
                await answer(send, *error, [JSON])
                return
            beginning, start = start, None
            await send(beginning)
        await send(event)

    def send_on(event: Event) -> Awaitable[None]:
        begins = begins_event_stream(event) and event["status"] == 200
        return send_late(event) if begins or answered or start is not None else send(event)

    return send_on


def _error_in(body: bytes) -> tuple[int, bytes] | None:
    """Return the status and the body of the error, if the first event is one."""
    if not body.startswith(_DATA + b'{"error"'):
        return None
    line = body.partition(b"\n")[0].removeprefix(_DATA)
    try:
        code = json.loads(line)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return (code, line) if isinstance(code, int) and 400 <= code <= 599 else None
