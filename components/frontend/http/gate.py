"""The gate in front of the OpenAI server: an ASGI middleware that lets requests through, or refuses them.

The gate checks paths, API keys, the size and the number of requests, and whether a worker is ready. Refusals have
OpenAI's error shape. The rules are pure (core/http/admission.py); here they are applied to HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from components.frontend.http.answers import JSON, answer, refuse
from components.frontend.http.body import BodyRefusedError, ClientGoneError, read_body, replayed
from components.frontend.http.early_errors import with_early_errors
from components.frontend.http.outgoing import with_setting_names, with_stream_headers
from dynamo_local.core.http.admission import AdmissionLimits, Refusal, examine, examine_headers, examine_text
from dynamo_local.core.http.asgi import App, Receive, Scope, Send, header, is_crowded
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.http.paths import Route, route_of, without_last_slash

RETRY_BUSY_S = 1
RETRY_NO_WORKER_S = 2


@dataclass(frozen=True)
class GateState:
    """The state of the frontend, asked for each request."""

    has_worker: Callable[[], bool]
    is_draining: Callable[[], bool]


@dataclass(frozen=True)
class SettingNames:
    """The service behind the gate and its settings, as errors name them."""

    service: str = "Frontend"
    settings: Collection[str] = ()


class HttpGate:
    """ASGI middleware. `api_keys` empty: requests need no key."""

    def __init__(
        self,
        app: App,
        *,
        limits: AdmissionLimits,
        state: GateState,
        api_keys: Sequence[str] = (),
        names: SettingNames = SettingNames(),  # frozen
    ) -> None:
        self._app = app
        self._limits = limits
        self._state = state
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._names = names
        self._sequences = 0
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            refusal = await self._serve({**scope, "path": without_last_slash(scope["path"])}, receive, send)
            if refusal is not None:
                await refuse(send, refusal)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        route = route_of(scope["path"])
        refusal = self._crowded(scope, route) or self._large_head(scope)
        if refusal is not None:
            return refusal
        if route is None:
            return Refusal(404, f"no such path: {scope['path']}", "NotFoundError")
        if scope["method"] not in route.methods:
            why = f"{scope['path']} takes {' and '.join(sorted(route.methods))}, not {scope['method']}"
            return Refusal(405, why, "MethodNotAllowedError", allowed=route.methods)
        if not route.keyless and not self._knows_key(scope):
            return Refusal(401, "missing or wrong API key", "AuthenticationError")
        if scope["path"] in ("/live", "/health", "/load"):
            return await self._answer_state(scope["path"], send)
        try:
            return await self._pass(route, scope, receive, send)
        except BodyRefusedError as error:
            return error.refusal
        except ClientGoneError:
            return None

    async def _answer_state(self, path: str, send: Send) -> Refusal | None:
        """Answer a path about the frontend's own state. Return a refusal instead if it is not healthy."""
        if path == "/health" and (unready := self._unready()) is not None:
            return unready
        if path == "/load":
            await answer(send, 200, msgspec.json.encode({"server_load": self._requests}), [JSON])
        else:
            await answer(send, 200, b"")
        return None

    async def _pass(self, route: Route, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return None
        if (refusal := examine_headers(scope["headers"])) is not None:
            return refusal
        body = await read_body(scope, receive, self._limits)
        if route.generates:
            return await self._generate(scope, body, receive, send)
        if (refusal := examine_text(body, self._limits)) is not None:
            return refusal
        await self._app(scope, replayed(body, receive), send)
        return None

    async def _generate(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> Refusal | None:
        try:
            body = as_utf8(body)
        except UnicodeDecodeError as error:
            return Refusal(400, f"the body is no text: {error}", "BadRequestError")
        judged = examine(body, self._limits)
        if isinstance(judged, Refusal):
            return judged
        if (unready := self._unready()) is not None:
            return unready
        if self._sequences + judged.sequences > self._limits.max_requests:
            return self._busy(judged.sequences)
        self._sequences += judged.sequences
        self._requests += 1
        outgoing = with_stream_headers(with_setting_names(send, self._names.service, self._names.settings))
        try:
            await self._app(scope, replayed(body, receive), with_early_errors(outgoing))
        finally:
            self._sequences -= judged.sequences
            self._requests -= 1
        return None

    def _busy(self, asked: int) -> Refusal:
        why = (
            f"{self._sequences} of at most {self._limits.max_requests} sequences (setting max-requests) are under way, "
            f"{asked} asked for"
        )
        return Refusal(429, why, "RateLimitError", retry_after_s=RETRY_BUSY_S)

    def _crowded(self, scope: Scope, route: Route | None) -> Refusal | None:
        """Refuse all but monitoring on connections beyond the limit."""
        if not is_crowded(scope) or (route is not None and route.keyless):
            return None
        return _unavailable(f"{self._limits.max_connections} connections (setting max-connections) are open")

    def _large_head(self, scope: Scope) -> Refusal | None:
        headers = scope["headers"]
        if len(headers) > self._limits.max_headers:
            why = f"more than {self._limits.max_headers} headers (setting max-headers)"
        elif _head_bytes(scope) > self._limits.max_header_bytes:
            why = f"path and headers are larger than {self._limits.max_header_bytes} bytes (setting max-header-bytes)"
        else:
            return None
        return Refusal(431, why, "BadRequestError")

    def _unready(self) -> Refusal | None:
        if self._state.is_draining():
            return _unavailable("the server is shutting down")
        return None if self._state.has_worker() else _unavailable("no worker is ready")

    def _knows_key(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        given = _digest(_bearer(scope))
        # Every key is compared, so that the time taken reveals nothing about the keys.
        return sum([hmac.compare_digest(given, key) for key in self._keys]) > 0


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return fields + len(scope["path"]) + len(scope.get("query_string", b""))


def _bearer(scope: Scope) -> bytes:
    """Return the key as OpenAI's clients send it (Authorization: Bearer) or as Anthropic's do (x-api-key)."""
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    return key if scheme.lower() == b"bearer" else header(scope, b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unavailable(why: str) -> Refusal:
    return Refusal(503, why, "ServiceUnavailableError", retry_after_s=RETRY_NO_WORKER_S)
