"""What comes in of a request: its head, which is bounded, and its body, read whole within a limit and a deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Generator
from itertools import chain
from types import coroutine
from typing import Any

import msgspec

from components.frontend.http.callers import Caller
from dynamo_local.core.http.asgi import Event, HeaderMap, Receive, Scope
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.paths import Route


class Asked(msgspec.Struct, frozen=True):
    """A request that the gate lets in. `headers`: those of its `scope`."""

    route: Route
    scope: Scope
    headers: HeaderMap
    caller: Caller


def examine_head(scope: Scope, limits: AdmissionLimits) -> Refusal | None:
    """Return the answer to a request whose head is too large."""
    headers = scope["headers"]
    if len(headers) > limits.max_headers:
        why = f"more than {limits.max_headers} headers (setting max-headers)"
    elif _bytes(scope) > limits.max_header_bytes:
        why = f"path and headers are larger than {limits.max_header_bytes} bytes (setting max-header-bytes)"
    else:
        return None
    return Refusal(431, why, "BadRequestError")


def examine_coding(headers: HeaderMap) -> Refusal | None:
    """Return the answer to a request whose body is compressed."""
    coding = headers.get(b"content-encoding", b"")
    if coding.lower() in (b"", b"identity"):
        return None
    why = f"the body is compressed ({coding.decode('latin-1')[:60]}): send it as it is, without Content-Encoding"
    return Refusal(415, why, "UnsupportedMediaTypeError")


def _bytes(scope: Scope) -> int:
    headers = sum(map(len, chain.from_iterable(scope["headers"])))
    return len(scope["path"]) + len(scope.get("query_string", b"")) + headers


# Bodies.

_LENGTH_DIGITS = 18
"""A Content-Length with more digits is too large, whatever the limit."""


class BodyRefusedError(Exception):
    """The body is too large, or arrives too slowly."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ClientGoneError(Exception):
    """The client disconnected before it had sent its whole request."""


async def read_body(headers: HeaderMap, receive: Receive, limits: AdmissionLimits) -> bytes:
    """Return the whole body. Raises BodyRefusedError as soon as the body exceeds the limits, or ClientGoneError."""
    if _announced_bytes(headers) > limits.max_body_bytes:
        raise _too_large(limits)
    reading = _read(receive, limits)
    try:
        waits_for = reading.send(None)
    except StopIteration as whole:
        # Most bodies have come with their heads. The timer alone would cost a sixth of what the gate does.
        body: bytes = whole.value
        return body
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _rest_of(reading, waits_for)
    except TimeoutError:
        why = f"the body has not come within {limits.body_timeout_s:g} s (setting body-timeout-s)"
        raise BodyRefusedError(Refusal(408, why, "RequestTimeoutError")) from None


@coroutine
def _rest_of(reading: Coroutine[Any, Any, bytes], waits_for: object) -> Generator[Any, Any, bytes]:
    """Await a coroutine that has begun, and waits."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 -- the coroutine gets it, a cancellation above all
                waits_for = reading.throw(error)
            else:
                waits_for = reading.send(sent)
    except StopIteration as whole:
        body: bytes = whole.value
        return body


async def _read(receive: Receive, limits: AdmissionLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise ClientGoneError
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if not event.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read already, then later events (the disconnection)."""
    given = False

    async def replay() -> Event:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _announced_bytes(headers: HeaderMap) -> float:
    """Return the Content-Length, or 0 without one: the bytes that arrive are counted in any case."""
    announced = headers.get(b"content-length", b"")
    if not announced.isdigit():
        return 0
    return int(announced) if len(announced) <= _LENGTH_DIGITS else math.inf


def _too_large(limits: AdmissionLimits) -> BodyRefusedError:
    why = f"the body is larger than {limits.max_body_bytes} bytes (setting max-body-bytes)"
    return BodyRefusedError(Refusal(413, why, "BadRequestError"))
