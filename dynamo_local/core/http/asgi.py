"""The types of ASGI, and what is read from requests and answers in several places."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HeaderMap = Mapping[bytes, bytes]
"""Headers by name, in lower case; of several of a name, the first."""

CROWDED = "dynamo_local.crowded"
"""Key of `scope["state"]`, true if the connection is one of those beyond max-connections."""


def header(carrier: Scope | Event, name: bytes) -> bytes:
    """Return the value of the first header of that name (in lower case) of a request or an answer, else nothing."""
    length = len(name)
    for key, value in carrier.get("headers", ()):
        if len(key) == length and key.lower() == name:
            found: bytes = value
            return found
    return b""


def headers_of(scope: Scope) -> HeaderMap:
    """Return the headers of a request."""
    return {name.lower(): value for name, value in reversed(scope["headers"])}


def begins_event_stream(event: Event) -> bool:
    """Return whether the event begins an answer that is a stream of server-sent events."""
    is_start: bool = event["type"] == "http.response.start"
    return is_start and header(event, b"content-type").startswith(b"text/event-stream")


def is_crowded(scope: Scope) -> bool:
    """Whether the request came on a connection beyond max-connections."""
    return bool(scope.get("state", {}).get(CROWDED, False))
