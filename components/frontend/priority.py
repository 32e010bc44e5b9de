"""The priority and the API key under which the submissions of an HTTP request go: those that the gate has found,
whatever vLLM's server makes of headers and body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from dynamo_local.core.ports import Request

_current: ContextVar[tuple[int, str] | None] = ContextVar("priority and key of this request", default=None)


@contextmanager
def submitted_at(priority: int, key: str) -> Iterator[None]:
    """Have what is submitted within, also by tasks that begin there, get this priority and key."""
    token = _current.set((priority, key))
    try:
        yield
    finally:
        _current.reset(token)


def prioritized(request: Request) -> Request:
    """Return the request with priority and key of the HTTP request that it belongs to; its own, if there is none."""
    found = _current.get()
    if found is None or found == (request.priority, request.key):
        return request
    priority, key = found
    return replace(request, priority=priority, key=key)
