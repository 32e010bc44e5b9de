"""Changes what the application of a model answers: headers, names of settings, and errors before the first token.

The OpenAI server begins a stream with status 200 before the engine has looked at the request. An error before the first
token is then an event in a stream that was called a success. Here the beginning waits for the first event: if that is
an error, the client is answered with its status, as if it had not asked for a stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Collection

from components.frontend.http.answers import JSON, with_length
from dynamo_local.core.http.asgi import Event, Send, begins_event_stream, header

_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that keep caches from storing event streams, and nginx from buffering them."""

_OPTION = re.compile(rb"(?<![\w-])--([a-z0-9]+(?:-[a-z0-9]+)*)")

_DATA = b"data: "


def stream_headers(headers: Collection[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an event stream with those that forbid caching and buffering."""
    there = {name.lower() for name, _ in headers}
    return [*headers, *(header for header in _STREAM_HEADERS if header[0] not in there)]


class Renaming:
    """Renames vLLM's options to the settings that set them: --tool-call-parser to --Frontend.tool-call-parser, if the
    service `Frontend` has that setting."""

    def __init__(self, service: str, settings: Collection[str]) -> None:
        self._service, self._settings = service.encode(), frozenset(name.encode() for name in settings)

    def __call__(self, text: bytes) -> bytes:
        """Return the text with the names of settings."""
        return _OPTION.sub(self._renamed, text)

    def _renamed(self, option: re.Match[bytes]) -> bytes:
        return b"--%s.%s" % (self._service, option[1]) if option[1] in self._settings else option[0]


class Outgoing:
    """An ASGI `send` for one answer of an application. Refusals name settings; every 503 tells to come again in
    `retry_s` seconds; event streams forbid caching and buffering, and begin with their first event.

    Most answers need none of it, and each of their parts passes here, so it is no coroutine then.
    """

    def __init__(self, send: Send, renaming: Renaming, retry_s: int) -> None:
        self._send = send
        self._renaming = renaming
        self._retry_s = retry_s
        self._start: Event | None = None
        """The beginning of the answer, as long as it waits for what comes next."""
        self._is_over = False
        """Whether the answer was an error, of which the client has the whole."""

    def __call__(self, event: Event) -> Awaitable[None]:
        if event["type"] == "http.response.start":
            return self._begin(event)
        if self._start is None and not self._is_over:
            return self._send(event)
        return self._go_on(event)

    def _begin(self, event: Event) -> Awaitable[None]:
        is_stream = begins_event_stream(event)
        if is_stream:
            event = {**event, "headers": stream_headers(event["headers"])}
        if event["status"] == 400 or (is_stream and event["status"] == 200):
            self._start = event
            return _nothing()
        return self._send(self._retried(event))

    async def _go_on(self, event: Event) -> None:
        """Send what follows a beginning that waits; nothing of what follows an error."""
        start, body = self._start, event.get("body", b"")
        if start is None or (start["status"] == 200 and not body and event.get("more_body", False)):
            return
        self._start = None
        if start["status"] == 200 and (error := _error_in(body)) is not None:
            status, body = error
            self._is_over = True
            event = {"type": "http.response.body", "body": body, "more_body": False}
            start = self._retried({"type": "http.response.start", "status": status, "headers": [JSON]})
            start["headers"] = with_length(start["headers"], len(body))
        if start["status"] == 400 and not event.get("more_body", False):
            event = {**event, "body": self._renaming(body)}
            start = {**start, "headers": with_length(start["headers"], len(event["body"]))}
        await self._send(start)
        await self._send(event)

    def _retried(self, start: Event) -> Event:
        if start["status"] != 503 or header(start, b"retry-after"):
            return start
        return {**start, "headers": [*start["headers"], (b"retry-after", b"%d" % self._retry_s)]}


async def _nothing() -> None:
    """Send nothing yet."""


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
