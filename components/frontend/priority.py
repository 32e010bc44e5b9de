"""The priority and the API key under which the submissions of an HTTP request go: those that the gate has found,
whatever vLLM's server makes of headers and body."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token

from msgspec import structs

from dynamo_local.core.ports import Request

_Terms = tuple[int, str]

_current: ContextVar[_Terms | None] = ContextVar("priority and key of this request", default=None)


def submitted_at(priority: int, key: str) -> AbstractContextManager[None]:
    """Have what is submitted within, also by tasks that begin there, get this priority and key."""
    return _Submitted((priority, key))


class _Submitted:
    """The context of `submitted_at`; no generator, since each request enters it."""

    __slots__ = ("_terms", "_token")

    def __init__(self, terms: _Terms) -> None:
        self._terms = terms

    def __enter__(self) -> None:
        self._token: Token[_Terms | None] = _current.set(self._terms)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def prioritized(request: Request) -> Request:
    """Return the request with priority and key of the HTTP request that it belongs to; its own, if there is none."""
    found = _current.get()
    if found is None or found == (request.priority, request.key):
        return request
    priority, key = found
    return structs.replace(request, priority=priority, key=key)
