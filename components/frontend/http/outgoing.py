"""Changes answers of the OpenAI server: the headers of streams, and the names of settings in errors.

Each part of each answer passes through every `send` here, so those are no coroutines where they have nothing to do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection

from dynamo_local.core.http.asgi import Event, Send, begins_event_stream, header

_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that keep caches from storing event streams, and nginx from buffering them."""

_OPTION = re.compile(rb"(?<![\w-])--([a-z0-9]+(?:-[a-z0-9]+)*)")


def with_stream_headers(send: Send) -> Send:
    """Return an ASGI `send` that forbids caching and buffering of event streams."""

    def send_on(event: Event) -> Awaitable[None]:
        if begins_event_stream(event):
            there = {name.lower() for name, _ in event["headers"]}
            more = [header for header in _STREAM_HEADERS if header[0] not in there]
            event = {**event, "headers": [*event["headers"], *more]}
        return send(event)

    return send_on


def with_retry_after(send: Send, seconds: int) -> Send:
    """Return an ASGI `send` that tells clients of every 503 when to send their request again."""

    def send_on(event: Event) -> Awaitable[None]:
        if event["type"] == "http.response.start" and event["status"] == 503 and not header(event, b"retry-after"):
            event = {**event, "headers": [*event["headers"], (b"retry-after", str(seconds).encode())]}
        return send(event)

    return send_on


def with_setting_names(send: Send, service: str, settings: Collection[str]) -> Send:
    """Return an ASGI `send` for one answer, which renames vLLM's options in refusals to the settings that set them:
    --tool-call-parser to --Frontend.tool-call-parser, if the service `Frontend` has that setting."""
    start: Event | None = None

    def renamed(option: re.Match[bytes]) -> bytes:
        return b"--%s.%s" % (service.encode(), option[1]) if option[1].decode() in settings else option[0]

    async def send_refused(event: Event) -> None:
        nonlocal start
        if start is None:
            start = event
        else:
            begin, start = start, None
            if not event.get("more_body", False):
                event = {**event, "body": _OPTION.sub(renamed, event.get("body", b""))}
                begin = _with_length(begin, len(event["body"]))
            await send(begin)
            await send(event)

    def send_on(event: Event) -> Awaitable[None]:
        refuses = event["type"] == "http.response.start" and event["status"] == 400
        return send_refused(event) if refuses or start is not None else send(event)

    return send_on


def _with_length(start: Event, length: int) -> Event:
    others = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    return {**start, "headers": [*others, (b"content-length", str(length).encode())]}
