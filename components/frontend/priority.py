"""The priority under which the submissions of an HTTP request go: that which the gate has found, whatever vLLM's server
makes of headers and body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from dynamo_local.core.ports import Request

_current: ContextVar[int | None] = ContextVar("priority of this request", default=None)


@contextmanager
def submitted_at(priority: int) -> Iterator[None]:
    """Have what is submitted within, also by tasks that begin there, get this priority."""
    token = _current.set(priority)
    try:
        yield
    finally:
        _current.reset(token)


def prioritized(request: Request) -> Request:
    """Return the request with the priority of the HTTP request that it belongs to; its own, if there is none."""
    priority = _current.get()
    return request if priority is None or priority == request.priority else replace(request, priority=priority)
