"""Requests that the frontend itself makes for a caller, in the process: the lines of batches, answers that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from components.frontend.http.callers import Caller, note_caller
from dynamo_local.core.http.asgi import Event, Scope


def own_scope(path: str, caller: Caller, headers: Iterable[tuple[bytes, bytes]]) -> Scope:
    """Return the scope of a POST request with a body of JSON, in which the caller is noted."""
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
    note_caller(scope, caller)
    return scope


async def nothing_more() -> Event:
    """Wait like a client that neither sends more nor leaves."""
    return await asyncio.Future[Event]()
