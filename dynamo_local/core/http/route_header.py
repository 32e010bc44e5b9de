"""The header that explains where a request went, in JSON and of bounded size. Pure."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_local.core.http.asgi import Scope
from dynamo_local.core.messages.routes import RouteRow
from dynamo_local.core.routing.explanation import NamedWorker, explained

EXPLAIN, ROUTE = b"x-dynamo-explain", b"x-dynamo-route"
"""Headers of requests that ask where they go, and of their answers."""

MOST_BYTES = 2_048
"""Bound on the header's value: proxies take 4 to 8 kB of headers in all."""


def is_asked(value: bytes) -> bool:
    """Whether the value of a request's header asks for the explanation."""
    return value.strip().lower() in (b"1", b"true")


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine. One by a unix socket, which has no address, does."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def header_value(routes: Sequence[dict[str, Any]]) -> bytes:
    """The header's value: a list with an assignment for each sequence of the request, or again where it went later.

    Left out first are the candidates of the highest costs, then the latest assignments.
    """
    kept = list(routes)
    most = max((len(route["candidates"]) for route in kept), default=0)
    while len(value := _told(kept, most)) > MOST_BYTES:
        if most:
            most -= 1
        else:
            kept.pop()
    return value


def described(route: RouteRow, name: NamedWorker) -> dict[str, Any]:
    """An assignment as the header tells it, with the names and words of `dynamo route --json`."""
    told: dict[str, Any] = msgspec.to_builtins(explained(route, name))
    return told


def _told(routes: Sequence[dict[str, Any]], candidates: int) -> bytes:
    told = [_with_candidates(route, candidates) for route in routes]
    return json.dumps(told, separators=(",", ":")).encode("ascii")


def _with_candidates(route: dict[str, Any], most: int) -> dict[str, Any]:
    candidates = route["candidates"]
    left_out = route["left_out"] + max(len(candidates) - most, 0)
    return {**route, "candidates": candidates[:most], "left_out": left_out}
