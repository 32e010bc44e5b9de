"""The gate in front of the OpenAI server: an ASGI middleware that lets requests through, or refuses them.

The gate checks paths, API keys, and the size of requests, and passes each request to the application of the model that
it asks for; those that generate by way of `generation.py`. Refusals have OpenAI's error shape. The rules are pure
(core/http/); here they are applied to HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from components.frontend.explaining import RouteNotes, explained
from components.frontend.http.administration import NO_ADMINISTRATION, NO_STORES, Administration, Handler, at
from components.frontend.http.answers import JSON, answer, refuse
from components.frontend.http.body import BodyRefusedError, ClientGoneError, read_body, replayed
from components.frontend.http.callers import (
    ANYBODY,
    Caller,
    Callers,
    asking,
    caller_of,
    note_caller,
)
from components.frontend.http.generation import DRAINING, GenerationRequest, Generations, unavailable
from components.frontend.http.kept import Keeping, KeptAnswers, Serve
from components.frontend.http.models import NO_APPLICATION, ModelTable
from components.frontend.http.outgoing import with_setting_names
from components.frontend.http.usage import UsageMeter, tally_of
from components.frontend.keys.known import KnownKeys
from components.frontend.keys.ticket import Gatekeeper, charge_to
from components.frontend.limits.rooms import Rooms
from components.frontend.priority import submitted_at
from dynamo_local.core.http.admission import (
    AdmissionLimits,
    Refusal,
    examine_headers,
    examine_text,
    read_fields,
)
from dynamo_local.core.http.asgi import App, Receive, Scope, Send, header, is_crowded
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.http.paths import ROUTES, USAGE, Route, route_of, without_last_slash
from dynamo_local.core.http.priority import HEADER_KEY, priority_asked
from dynamo_local.core.http.route_header import ASKED, is_asked, is_local


@dataclass(frozen=True)
class SettingNames:
    """The service behind the gate and its settings, as errors name them."""

    service: str = "Frontend"
    settings: Collection[str] = ()


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
        administration: Administration = NO_ADMINISTRATION,
        meter: UsageMeter | None = None,
        known_keys: KnownKeys | None = None,
        gatekeeper: Gatekeeper | None = None,
        stores: Mapping[str, Handler] = NO_STORES,
        answers: KeptAnswers | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        """`known_keys`: those of the registry; `gatekeeper`: keeps their limits. `stores`: answers about what is stored
        for clients, by the beginning of the path. `answers`: those that are kept. `rooms`: as in Generations."""
        self._app = app
        self._limits = limits
        self._models = models
        self._is_draining = is_draining
        self._callers = Callers(api_keys, administration.keys, known_keys)
        self._gatekeeper = gatekeeper
        self._names = names
        self._settings = frozenset(names.settings)
        self._administration = administration
        self._stores = stores
        self._generations = Generations(models, is_draining, meter=meter, rooms=rooms)
        self._keeping = None if answers is None else Keeping(answers, limits, self._admit)

    def take_keys(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        """Ask for these keys from now on. Requests under way go on."""
        self._callers.take(api_keys, admin_keys)

    def caller_for(self, owner: str) -> Caller | None:
        """Return who an owner of stored things is now (`Caller.owner`). None: the key is gone, or has expired."""
        return self._callers.of_owner(owner)

    async def answer_own(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a POST request that the frontend itself makes for the caller that is noted in the scope: counted as
        theirs, without the limits of their key."""
        await self._answer_by(self._post, scope, receive, send)

    async def answer_kept(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose answer is kept, as if its caller, who is noted in the scope, had sent it just now."""
        await self._answer_by(self._admit, scope, receive, send)

    async def _answer_by(self, serve: Serve, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refusal = await serve(ROUTES[scope["path"]], scope, receive, send)
        except BodyRefusedError as error:
            refusal = error.refusal
        if refusal is not None:
            await refuse(send, refusal)

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
        if route.stored:
            return await at(self._stores, scope["path"])(scope, receive, send)
        if route.keeps and self._keeping is not None:
            return await self._keeping.serve(route, scope, receive, send)
        if scope["method"] != "POST":
            with asking(caller_of(scope)):
                await self._app(scope, receive, send)
            return None
        return await self._admit(route, scope, receive, send)

    async def _admit(self, route: Route, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Count a request against the limits of its key, and answer it."""
        key = caller_of(scope).key
        if key is None or self._gatekeeper is None or not route.asks_model:
            return await self._post(route, scope, receive, send)
        ticket = self._gatekeeper.admit(key)
        send = ticket.sending(send)
        try:
            refusal = ticket.refusal
            if refusal is None:
                charge_to(ticket)
                refusal = await self._post(route, scope, receive, send)
            if refusal is not None:
                await refuse(send, refusal)
        finally:
            ticket.end(tally_of(scope).total)
        return None

    async def _post(self, route: Route, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
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
        entry = self._models.asked(fields, scope["path"], caller_of(scope).allows)
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
        priority = priority_asked(fields, header(scope, HEADER_KEY), caller_of(scope).priorities)
        if isinstance(priority, Refusal):
            return priority
        streams = route.streams and fields.get("stream") is True
        request = GenerationRequest(scope, body, fields, streams, priority, caller_of(scope).name or "")
        notes = RouteNotes() if self._may_explain(scope) else None
        if notes is None:
            with submitted_at(priority, request.key):
                return await self._generations.serve(request, receive, send, self._renamed)
        with submitted_at(priority, request.key), explained(notes):
            return await self._generations.serve(request, receive, notes.sending(send), self._renamed)

    def _may_explain(self, scope: Scope) -> bool:
        """Whether the client asks where its request goes, and may know it: administrators, and anybody on this machine
        where there are no keys."""
        if not is_asked(header(scope, ASKED)):
            return False
        is_open = not self._callers.needs_key and not self._callers.has_admins
        return caller_of(scope).admin or (is_open and is_local(scope))

    def _renamed(self, send: Send) -> Send:
        return with_setting_names(send, self._names.service, self._settings)

    async def _order(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        body = await read_body(scope, receive, self._limits)
        answered = await self._administered(scope, body)
        if isinstance(answered, Refusal):
            return answered
        status, content = answered
        await answer(send, status, content, [JSON])
        return None

    async def _administered(self, scope: Scope, body: bytes) -> tuple[int, bytes] | Refusal:
        """Have the part answer whose path it is."""
        if scope["path"] == USAGE:
            return await self._administration.tell_usage(scope.get("query_string", b""))
        orders = at(self._administration.orders, scope["path"])
        return await orders(scope["method"], scope["path"], body, caller_of(scope).name or "")

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
        """Find who asks, and note it in the scope. Refuse those who may not ask for this."""
        caller = self._callers.find(scope)
        if isinstance(caller, Refusal):
            note_caller(scope, ANYBODY)
            return None if route.keyless else caller
        note_caller(scope, caller)
        if route.admin:
            return self._no_admin(scope["path"], caller)
        if route.keyless or not self._callers.needs_key or (caller.name is not None and caller.generates):
            return None
        return Refusal(401, "missing or wrong API key", "AuthenticationError")

    def _no_admin(self, path: str, caller: Caller) -> Refusal | None:
        if not self._callers.has_admins:
            why = (
                f"{path} is closed: set admin-key-file of {self._names.service} to open it to administrators, or "
                "create a key of an administrator (dynamo key create NAME --admin)"
            )
            return Refusal(403, why, "PermissionDeniedError")
        if caller.admin:
            return None
        if caller.name is not None:
            return Refusal(403, "this needs the key of an administrator", "PermissionDeniedError")
        return Refusal(401, "missing or wrong key of an administrator", "AuthenticationError")


def _head_bytes(scope: Scope) -> int:
    size = len(scope["path"]) + len(scope.get("query_string", b""))
    for name, value in scope["headers"]:
        size += len(name) + len(value)
    return size
