"""The gate in front of the OpenAI server: an ASGI middleware that lets requests through, or refuses them.

The gate checks paths, API keys, and the size of requests, and passes each request to the application of the model that
it asks for; those that generate by way of `generation.py`. Refusals have OpenAI's error shape. The rules are pure
(core/http/); here they are applied to HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from components.frontend.http.answers import JSON, answer, refuse
from components.frontend.http.body import BodyRefusedError, ClientGoneError, read_body, replayed
from components.frontend.http.generation import DRAINING, GenerationRequest, Generations, unavailable
from components.frontend.http.models import NO_APPLICATION, ModelTable
from components.frontend.http.outgoing import with_setting_names
from dynamo_local.core.http.admission import (
    AdmissionLimits,
    Refusal,
    examine_headers,
    examine_text,
    read_fields,
)
from dynamo_local.core.http.asgi import App, Receive, Scope, Send, header, is_crowded
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.http.paths import Route, route_of, without_last_slash

Orders = Callable[[str, str, bytes], Awaitable[tuple[int, bytes] | Refusal]]
"""Carries out a request about endpoints: method, path, body. Returns status and body of the answer."""


@dataclass(frozen=True)
class SettingNames:
    """The service behind the gate and its settings, as errors name them."""

    service: str = "Frontend"
    settings: Collection[str] = ()


@dataclass(frozen=True)
class Administration:
    """The paths about endpoints, and the keys that open them. Without keys they stay closed."""

    keys: Sequence[str] = ()
    orders: Orders | None = None


class HttpGate:
    """ASGI middleware around the application that concerns no single model. `api_keys` empty: requests need no key.

    `limits`: of connections, heads and bodies, before it is known which model is asked for.
    """

    def __init__(
        self,
        app: App,
        *,
        limits: AdmissionLimits,
        models: ModelTable,
        is_draining: Callable[[], bool],
        api_keys: Sequence[str] = (),
        names: SettingNames = SettingNames(),  # frozen
        administration: Administration = Administration(),  # frozen
    ) -> None:
        self._app = app
        self._limits = limits
        self._models = models
        self._is_draining = is_draining
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._names = names
        self._administration = administration
        self._admin_keys = [_digest(key.encode()) for key in administration.keys]
        self._generations = Generations(models, is_draining)

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
        if (refusal := self._unknown_client(scope, route)) is not None:
            return refusal
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
        if path == "/health" and (unready := self._unready(self._models.why_none())) is not None:
            return unready
        if path == "/load":
            await answer(send, 200, msgspec.json.encode({"server_load": self._generations.under_way}), [JSON])
        else:
            await answer(send, 200, b"")
        return None

    async def _pass(self, route: Route, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        if route.admin:
            return await self._order(scope, receive, send)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return None
        if (refusal := examine_headers(scope["headers"])) is not None:
            return refusal
        body = await read_body(scope, receive, self._limits)
        if route.generates:
            return await self._generate(route, scope, body, receive, send)
        fields = examine_text(body, self._limits)
        if isinstance(fields, Refusal):
            return fields
        if not route.asks_model:
            await self._app(scope, replayed(body, receive), send)
            return None
        return await self._call(fields, scope, replayed(body, receive), send)

    async def _call(self, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Have a model answer a request that generates nothing."""
        entry = self._models.asked(fields, scope["path"])
        if isinstance(entry, Refusal):
            return entry
        if entry.app is None:
            return self._unready(entry.why_not() or NO_APPLICATION)
        entry.calls += 1
        try:
            await entry.app(scope, receive, send)
        finally:
            entry.calls -= 1
        return None

    async def _generate(self, route: Route, scope: Scope, body: bytes, receive: Receive, send: Send) -> Refusal | None:
        try:
            body = as_utf8(body)
        except UnicodeDecodeError as error:
            return Refusal(400, f"the body is no text: {error}", "BadRequestError")
        fields = read_fields(body)
        if isinstance(fields, Refusal):
            return fields
        request = GenerationRequest(scope, body, fields, route.streams and fields.get("stream") is True)
        return await self._generations.serve(request, receive, send, self._renamed)

    def _renamed(self, send: Send) -> Send:
        return with_setting_names(send, self._names.service, self._names.settings)

    async def _order(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        orders = self._administration.orders
        assert orders is not None, "without orders there are no keys"
        body = await read_body(scope, receive, self._limits)
        answered = await orders(scope["method"], scope["path"], body)
        if isinstance(answered, Refusal):
            return answered
        status, content = answered
        await answer(send, status, content, [JSON])
        return None

    def _crowded(self, scope: Scope, route: Route | None) -> Refusal | None:
        """Refuse all but monitoring on connections beyond the limit."""
        if not is_crowded(scope) or (route is not None and route.keyless):
            return None
        return unavailable(f"{self._limits.max_connections} connections (setting max-connections) are open")

    def _large_head(self, scope: Scope) -> Refusal | None:
        headers = scope["headers"]
        if len(headers) > self._limits.max_headers:
            why = f"more than {self._limits.max_headers} headers (setting max-headers)"
        elif _head_bytes(scope) > self._limits.max_header_bytes:
            why = f"path and headers are larger than {self._limits.max_header_bytes} bytes (setting max-header-bytes)"
        else:
            return None
        return Refusal(431, why, "BadRequestError")

    def _unready(self, why: str | None) -> Refusal | None:
        if self._is_draining():
            return unavailable(DRAINING.why)
        return None if why is None else unavailable(why)

    def _unknown_client(self, scope: Scope, route: Route) -> Refusal | None:
        if route.admin:
            return self._no_admin(scope)
        if route.keyless or not self._keys or _knows(self._keys, scope):
            return None
        return Refusal(401, "missing or wrong API key", "AuthenticationError")

    def _no_admin(self, scope: Scope) -> Refusal | None:
        if not self._admin_keys:
            why = f"{scope['path']} is closed: set admin-key-file of {self._names.service} to open it to administrators"
            return Refusal(403, why, "PermissionDeniedError")
        if _knows(self._admin_keys, scope):
            return None
        if self._keys and _knows(self._keys, scope):
            return Refusal(403, "this needs the key of an administrator (admin-key-file)", "PermissionDeniedError")
        return Refusal(401, "missing or wrong key of an administrator (admin-key-file)", "AuthenticationError")


def _knows(keys: Sequence[bytes], scope: Scope) -> bool:
    given = _digest(_bearer(scope))
    # Every key is compared, so that the time taken reveals nothing about the keys.
    return sum([hmac.compare_digest(given, key) for key in keys]) > 0


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return fields + len(scope["path"]) + len(scope.get("query_string", b""))


def _bearer(scope: Scope) -> bytes:
    """Return the key as OpenAI's clients send it (Authorization: Bearer) or as Anthropic's do (x-api-key)."""
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    return key if scheme.lower() == b"bearer" else header(scope, b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
