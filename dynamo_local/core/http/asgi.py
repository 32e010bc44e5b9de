"""The types of ASGI, and two small readings of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CROWDED = "dynamo_local.crowded"
"""Key of `scope["state"]`, true if the connection is one of those beyond max-connections."""


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that name, in lower case, or nothing."""
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def is_crowded(scope: Scope) -> bool:
    """Whether the request came on a connection beyond max-connections."""
    return bool(scope.get("state", {}).get(CROWDED, False))
