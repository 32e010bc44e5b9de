"""The gate in front of the OpenAI server: an ASGI middleware that lets requests through, or refuses them.

The gate checks paths, API keys, and the size of requests, and passes each request to the application of the model that
it asks for; those that generate by way of `generation.py`. Refusals have the shape of the API at their path. The rules
are pure (core/http/); here they are applied to HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from components.frontend.answers.rest import AnswersRest, Serve
from components.frontend.http.callers import ANYBODY, Caller, Callers
from components.frontend.http.exchange import GenerationRequest, unavailable
from components.frontend.http.generation import DRAINING, Generations
from components.frontend.http.incoming import (
    Asked,
    BodyRefusedError,
    ClientGoneError,
    examine_coding,
    examine_head,
    read_body,
    replayed,
)
from components.frontend.http.models import NO_APPLICATION, ModelTable
from components.frontend.http.outgoing import JSON, Renaming, answer, in_dialect, refuse
from components.frontend.http.usage import UsageMeter
from components.frontend.keys.known import KnownKeys
from components.frontend.keys.ticket import Ticket
from components.frontend.limits.rooms import Rooms
from components.frontend.request_context import RequestContext, RouteNotes, Within, note_request, request_of, tally_of
from dynamo_local.core.http.asgi import App, Receive, Scope, Send, headers_of, is_crowded
from dynamo_local.core.http.bounds.admission import (
    HEADER_KEY,
    AdmissionLimits,
    Refusal,
    examine_headers,
    examine_text,
    examine_tokens,
    priority_asked,
    read_fields,
)
from dynamo_local.core.http.bounds.request import JUDGED_HEADERS
from dynamo_local.core.http.json_text import as_utf8, boolean
from dynamo_local.core.http.paths import DETOKENIZE, ROUTES, Route, route_of, without_last_slash
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.core.routing.explanation import EXPLAIN, is_asked, is_local

# The paths that the frontend answers itself: which part of it carries out what is asked for there.

Orders = Callable[[Scope, bytes, str], Awaitable[tuple[int, bytes] | Refusal]]
"""Carries out a request of an administrator: its scope, its body, and the name of the key of who asks. Returns status
and body of the answer."""

Handler = Callable[[Scope, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns why not."""

_Part = TypeVar("_Part")


def at(parts: Mapping[str, _Part], path: str) -> _Part:
    """Return the part that answers at an open path. `parts`: by the beginning of their paths."""
    return next(part for beginning, part in parts.items() if path.startswith(beginning))


async def _nothing(scope: Scope, body: bytes, by: str) -> Refusal:
    return Refusal(404, f"no such path: {scope['path']}", "NotFoundError")


@dataclass(frozen=True)
class Administration:
    """`keys`: those of a file that open the paths, beside keys of administrators in the registry. `orders`: carries out
    what they ask for."""

    keys: Sequence[str] = ()
    orders: Orders = _nothing


NO_ADMINISTRATION = Administration()
"""The paths are closed."""

NO_STORES: Mapping[str, Handler] = MappingProxyType({})
"""Nothing is stored."""


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
        admit: Callable[[ApiKey], Ticket] | None = None,
        stores: Mapping[str, Handler] = NO_STORES,
        answers: AnswersRest | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        """`known_keys`: those of the registry; `admit`: gives the tickets of their requests. `stores`: answers about
        what is stored for clients, by the beginning of the path. `answers`: those that are kept. `rooms`: as in
        Generations."""
        self._app = app
        self._limits = limits
        self._models = models
        self._is_draining = is_draining
        self._callers = Callers(api_keys, administration.keys, known_keys)
        self._admit_key = admit
        self._names = names
        self._renaming = Renaming(names.service, names.settings)
        self._administration = administration
        self._stores = stores
        self._generations = Generations(models, is_draining, meter=meter, rooms=rooms)
        self._kept_answers = answers

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
        context = request_of(scope)
        asked = Asked(ROUTES[scope["path"]], scope, headers_of(scope), context.caller)
        send = in_dialect(scope["path"], send)
        try:
            with Within(context):
                if asked.route.keeps and self._kept_answers is not None:
                    refusal = await self._kept_answers.serve(asked, self._limits, receive, send, serve, keeps=False)
                else:
                    refusal = await serve(asked, receive, send)
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
            path = without_last_slash(scope["path"])
            send = in_dialect(path, send)
            refusal = await self._serve({**scope, "path": path}, receive, send)
            if refusal is not None:
                await refuse(send, refusal)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        path = scope["path"]
        route = route_of(path)
        if (refusal := self._crowded(scope, route) or examine_head(scope, self._limits)) is not None:
            return refusal
        if route is None:
            return Refusal(404, f"no such path: {path}", "NotFoundError")
        if scope["method"] not in route.methods:
            why = f"{path} takes {' and '.join(sorted(route.methods))}, not {scope['method']}"
            return Refusal(405, why, "MethodNotAllowedError", allowed=route.methods)
        headers = headers_of(scope)
        caller = self._callers.find(headers)
        if isinstance(caller, Refusal):
            if not route.keyless:
                return caller
            caller = ANYBODY
        elif (refusal := self._callers.refusal_of(caller, path, route, self._names.service)) is not None:
            return refusal
        note_request(scope, context := RequestContext(caller=caller))
        try:
            with Within(context):
                return await self._pass(Asked(route, scope, headers, caller), receive, send)
        except BodyRefusedError as error:
            return error.refusal
        except ClientGoneError:
            return None

    async def _pass(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        route, scope = asked.route, asked.scope
        if (refusal := examine_coding(asked.headers)) is not None:
            return refusal
        if route.admin:
            return await self._order(asked, receive, send)
        if route.stored:
            return await at(self._stores, scope["path"])(scope, receive, send)
        if route.keeps and self._kept_answers is not None:
            return await self._kept_answers.serve(asked, self._limits, receive, send, self._admit)
        if scope["method"] != "POST":
            return await self._look(asked, receive, send)
        return await self._admit(asked, receive, send)

    async def _admit(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        """Count a request against the limits of its key, and answer it."""
        key = asked.caller.key
        if key is None or self._admit_key is None or not asked.route.asks_model:
            return await self._post(asked, receive, send)
        ticket = self._admit_key(key)
        send = ticket.sending(send)
        try:
            refusal = ticket.refusal
            if refusal is None:
                request_of(asked.scope).ticket = ticket
                refusal = await self._post(asked, receive, send)
                if refusal is not None and refusal.status == 404:
                    ticket.give_back_request()
            if refusal is not None:
                await refuse(send, refusal)
        finally:
            ticket.end(tally_of(asked.scope).total)
        return None

    async def _look(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        if asked.scope["path"] in ("/live", "/health", "/load"):
            return await self._answer_state(asked.scope["path"], send)
        await self._app(asked.scope, receive, send)
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

    async def _post(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        route, scope = asked.route, asked.scope
        judged = any(name in asked.headers for name in JUDGED_HEADERS)
        if judged and (refusal := examine_headers(scope["headers"])) is not None:
            return refusal
        body = await read_body(asked.headers, receive, self._limits)
        if route.generates:
            return await self._generate(asked, body, receive, send)
        fields = examine_text(body, self._limits)
        if isinstance(fields, Refusal):
            return fields
        if not route.asks_model:
            await self._app(scope, replayed(body, receive), send)
            return None
        return await self._call(fields, asked, replayed(body, receive), send)

    async def _call(self, fields: dict[str, Any], asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        """Have a model answer a request that generates nothing."""
        entry = self._models.asked(fields, asked.scope["path"], asked.caller.allows)
        if isinstance(entry, Refusal):
            return entry
        if entry.app is None:
            return self._unready(entry.why_not() or NO_APPLICATION)
        if asked.scope["path"] == DETOKENIZE and (refusal := examine_tokens(fields, entry.vocabulary)) is not None:
            return refusal
        entry.calls += 1
        try:
            await entry.app(asked.scope, receive, send)
        finally:
            entry.calls -= 1
        return None

    async def _generate(self, asked: Asked, body: bytes, receive: Receive, send: Send) -> Refusal | None:
        try:
            body = as_utf8(body)
        except UnicodeDecodeError as error:
            return Refusal(400, f"the body is no text: {error}", "BadRequestError")
        fields = read_fields(body)
        if isinstance(fields, Refusal):
            return fields
        priority = priority_asked(fields, asked.headers.get(HEADER_KEY, b""), asked.caller.priorities)
        if isinstance(priority, Refusal):
            return priority
        streams = asked.route.streams and boolean(fields.get("stream")) is True
        request = GenerationRequest(asked.scope, body, fields, streams, priority, asked.caller.name or "")
        context = request_of(asked.scope)
        context.terms = priority, request.key
        if EXPLAIN in asked.headers and self._may_explain(asked):
            context.notes = RouteNotes()
            send = context.notes.sending(send)
        return await self._generations.serve(request, receive, send, self._renaming)

    def _may_explain(self, asked: Asked) -> bool:
        """Whether the client asks where its request goes, and may know it: administrators, and anybody on this machine
        where there are no keys."""
        if not is_asked(asked.headers[EXPLAIN]):
            return False
        is_open = not self._callers.needs_key and not self._callers.has_admins
        return asked.caller.admin or (is_open and is_local(asked.scope))

    async def _order(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        body = await read_body(asked.headers, receive, self._limits)
        answered = await self._administration.orders(asked.scope, body, asked.caller.name or "")
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

    def _unready(self, why: str | None) -> Refusal | None:
        if self._is_draining():
            return unavailable(DRAINING.why)
        return None if why is None else unavailable(why)
