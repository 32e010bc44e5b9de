"""The gate before the OpenAI server: an ASGI middleware that lets through what clients may ask, and only that.

It knows which paths are open (an allow-list: the server behind it has others, which change it), who may enter, how
large and how many requests may be, and whether anybody is there to serve them. Refusals have OpenAI's error shape.
The decisions are pure (core/admission.py); here they meet HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.admission import Limits, Refusal, examine, examine_headers, examine_text
from dynamo_local.runtime.early_errors import with_early_errors

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
OPEN_PATHS = GENERATION_PATHS | {
    "/v1/models",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/health",
    "/live",
    "/ping",
    "/version",
    "/metrics",
}
KEYLESS_PATHS = frozenset({"/health", "/live", "/ping", "/version", "/metrics"})
"""Open to whoever reaches the port, as monitoring expects."""

RETRY_BUSY_S = 1
RETRY_NO_WORKER_S = 2


_LENGTH_DIGITS = 18
"""A Content-Length with more digits is too large, whatever the limit."""


class _TooLargeError(Exception):
    """The body exceeds the limit."""


class _GoneError(Exception):
    """The client hung up before it had sent its request."""


@dataclass(frozen=True)
class GateState:
    """What the gate asks of the frontend at every request."""

    has_worker: Callable[[], bool]
    is_draining: Callable[[], bool]


class HttpGate:
    """Pure ASGI. `api_keys` empty: no key is asked for."""

    def __init__(self, app: App, *, limits: Limits, state: GateState, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._limits = limits
        self._state = state
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            refusal = await self._serve(scope, receive, send)
            if refusal is not None:
                await _refuse(send, refusal)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        path = scope["path"]
        if path not in OPEN_PATHS:
            return Refusal(404, f"no such path: {path}", "NotFoundError")
        if path == "/live":
            await _answer(send, 200, b"")
            return None
        if path == "/health":
            if (unready := self._unready()) is None:
                await _answer(send, 200, b"")
            return unready
        if path not in KEYLESS_PATHS and scope["method"] != "OPTIONS" and not self._knows_key(scope):
            return Refusal(401, "missing or wrong API key", "AuthenticationError")
        try:
            return await self._pass(scope, receive, send)
        except _TooLargeError:
            why = f"the body is larger than {self._limits.max_body_bytes} bytes"
            return Refusal(413, why, "BadRequestError")
        except _GoneError:
            return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return None
        generates = scope["path"] in GENERATION_PATHS
        if (refusal := examine_headers(scope["headers"], self._limits, generates=generates)) is not None:
            return refusal
        body = await self._read(scope, receive)
        if not generates:
            if (refusal := examine_text(body, self._limits)) is not None:
                return refusal
            await self._app(scope, _replay(body, receive), send)
            return None
        return await self._generate(scope, body, receive, send)

    async def _generate(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> Refusal | None:
        judged = examine(body, self._limits)
        if isinstance(judged, Refusal):
            return judged
        if (unready := self._unready()) is not None:
            return unready
        if self._under_way + judged.sequences > self._limits.max_requests:
            return Refusal(
                429,
                f"{self._under_way} of at most {self._limits.max_requests} sequences are under way, "
                f"{judged.sequences} asked for",
                "RateLimitError",
                retry_after_s=RETRY_BUSY_S,
            )
        self._under_way += judged.sequences
        try:
            await self._app(scope, _replay(body, receive), with_early_errors(send))
        finally:
            self._under_way -= judged.sequences
        return None

    def _unready(self) -> Refusal | None:
        if self._state.is_draining():
            return _unavailable("the server is shutting down")
        return None if self._state.has_worker() else _unavailable("no worker is ready")

    def _knows_key(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        given = _digest(_bearer(scope))
        # Every key is compared, so that the time taken tells nothing.
        return sum([hmac.compare_digest(given, key) for key in self._keys]) > 0

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises _TooLargeError as soon as it is known to exceed the limit, or _GoneError."""
        if _announced_bytes(scope) > self._limits.max_body_bytes:
            raise _TooLargeError
        parts: list[bytes] = []
        size = 0
        while True:
            event = await receive()
            if event["type"] != "http.request":
                raise _GoneError
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.max_body_bytes:
                raise _TooLargeError
            if not event.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read already, then what still comes (the disconnection)."""
    given = False

    async def replay() -> Event:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def _announced_bytes(scope: Scope) -> float:
    """What Content-Length says, 0 if it says nothing: what comes is counted in any case."""
    announced = _header(scope, b"content-length")
    if not announced.isdigit():
        return 0
    return int(announced) if len(announced) <= _LENGTH_DIGITS else math.inf


def _bearer(scope: Scope) -> bytes:
    """The key as OpenAI's clients send it (Authorization: Bearer) or as Anthropic's do (x-api-key)."""
    scheme, _, key = _header(scope, b"authorization").partition(b" ")
    return key if scheme.lower() == b"bearer" else _header(scope, b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unavailable(why: str) -> Refusal:
    return Refusal(503, why, "ServiceUnavailableError", retry_after_s=RETRY_NO_WORKER_S)


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = [(b"content-type", b"application/json")]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _answer(send, refusal.status, refusal.body(), headers)


async def _answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    all_headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
