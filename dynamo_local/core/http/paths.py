"""The paths that are open, and with which methods. An allow-list: the server behind has others, which change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MODEL_PREFIX = "/v1/models/"
"""Prefix of a model's path. The rest is the model's name, which may contain slashes."""


@dataclass(frozen=True)
class Route:
    """Methods that are open at a path."""

    methods: frozenset[str]
    generates: bool = False
    """The body asks for tokens; admission counts its sequences."""
    keyless: bool = False
    """No API key is needed, as monitoring expects."""


_GENERATION = Route(frozenset({"POST"}), generates=True)
_CALL = Route(frozenset({"POST"}))
_LOOK = Route(frozenset({"GET"}))
_PUBLIC = Route(frozenset({"GET", "HEAD"}), keyless=True)
_PAGE = Route(frozenset({"GET"}), keyless=True)

ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        "/v1/chat/completions": _GENERATION,
        "/v1/chat/completions/batch": _GENERATION,
        "/v1/completions": _GENERATION,
        "/v1/responses": _GENERATION,
        "/v1/messages": _GENERATION,
        "/generative_scoring": _GENERATION,
        "/invocations": _GENERATION,
        "/v1/messages/count_tokens": _CALL,
        "/tokenize": _CALL,
        "/detokenize": _CALL,
        "/v1/models": _LOOK,
        "/health": _PUBLIC,
        "/live": _PUBLIC,
        "/load": _PUBLIC,
        "/metrics": _PUBLIC,
        "/ping": Route(frozenset({"GET", "POST"}), keyless=True),
        "/version": _PAGE,
        "/docs": _PAGE,
        "/openapi.json": _PAGE,
        "/static/swagger-ui.css": _PAGE,
        "/static/swagger-ui-bundle.js": _PAGE,
    }
)


def route_of(path: str) -> Route | None:
    """Find what is open at exactly this path; None if nothing is."""
    if path.startswith(MODEL_PREFIX) and path != MODEL_PREFIX:
        return _LOOK
    return ROUTES.get(path)


def without_last_slash(path: str) -> str:
    """The path as it is known here: clients and scrapers write some with a slash at the end."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path
