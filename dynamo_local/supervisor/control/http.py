"""The control API over HTTP: requests become calls of handlers, and what these return or raise becomes answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo_local import __version__
from dynamo_local.control.client import BY, EVENT_STREAM, LAST_EVENT_ID
from dynamo_local.control.errors import RETRY_S, UNAVAILABLE, content_of, status_of
from dynamo_local.control.openapi import openapi
from dynamo_local.control.operations import MOST_BYTES, OPERATIONS, Call, Operation, OtherSuccess
from dynamo_local.core.errors import DynamoError, OrderError, OrderTooLargeError
from dynamo_local.supervisor.control.api import ControlApi, EventStream

_BODY_S = 10.0
_CONNECTIONS = 256
_END_S = 2
_TICKS = 10


class HttpServer(uvicorn.Server):
    """Serves an API on sockets that are given to `serve`, and those that `further` returns, until `should_exit`."""

    def __init__(self, api: ControlApi, further: Callable[[], socket.socket | None]) -> None:
        self._further = further
        super().__init__(
            uvicorn.Config(
                application(api),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_graceful_shutdown=_END_S,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """Look for a further socket, about once a second."""
        if counter % _TICKS == 0 and (further := self._further()) is not None:
            # uvicorn types the class as any asyncio protocol.
            protocol: Any = self.config.http_protocol_class
            make = partial(protocol, self.config, self.server_state, self.lifespan.state)
            self.servers.append(await asyncio.get_running_loop().create_server(make, sock=further))
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which has handlers of its own."""
        yield


def application(api: ControlApi) -> ASGIApp:
    """Return the ASGI application."""
    document = msgspec.json.encode(openapi(__version__))

    async def describe(_: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [_route(api, operation) for operation in OPERATIONS]
    return _by_raw_path(Starlette(routes=[*routes, Route("/openapi.json", describe)]))


def _by_raw_path(app: ASGIApp) -> ASGIApp:
    """Have paths matched before they are decoded: a name in one may hold a slash."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        await app({**scope, "path": scope["path"] if raw is None else raw.decode("latin-1")}, receive, send)

    return answer


def _route(api: ControlApi, operation: Operation) -> Route:
    async def answer(request: Request) -> Response:
        try:
            content = await api.handler(operation)(await _call(request))
            if isinstance(content, OtherSuccess):
                return _response(content.content, content.status)
            return _response(content, operation.status)
        except DynamoError as error:
            return _response(content_of(error), status_of(error))

    return Route(operation.path, answer, methods=[operation.method], name=operation.name)


def _response(content: object, status: int) -> Response:
    if isinstance(content, EventStream):
        return _Streaming(content)
    headers = {"retry-after": str(RETRY_S)} if status == UNAVAILABLE else None
    return Response(msgspec.json.encode(content), status, headers, "application/json")


class _Streaming(StreamingResponse):
    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream.content, headers={"cache-control": "no-store"}, media_type=EVENT_STREAM)
        self._taken_within_s = stream.taken_within_s

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._taken_within_s):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().stream_response(send_in_time)


async def _call(request: Request) -> Call:
    names = {key: unquote(name) for key, name in request.path_params.items()}
    headers, query = request.headers, dict(request.query_params)
    if LAST_EVENT_ID in headers:
        # Newer than what the address says: who reconnects asks for the same address again.
        query["after"] = headers[LAST_EVENT_ID]
    by, streams = unquote(headers.get(BY, "")), EVENT_STREAM in headers.get("accept", "")
    return Call(names, query, await _body(request), by, streams)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise OrderTooLargeError(f"the body is larger than {MOST_BYTES} bytes")
    except (TimeoutError, ClientDisconnect):
        raise OrderError("the body did not arrive") from None
    return bytes(body)
