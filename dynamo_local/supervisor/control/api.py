"""The control API of a server: HTTP and JSON on a unix socket that its owner alone can open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_local.control.client import BY, EVENT_STREAM, LAST_EVENT_ID
from dynamo_local.control.errors import RETRY_S, UNAVAILABLE, content_of, status_of
from dynamo_local.control.operations import MOST_BYTES, OPERATIONS, Call, Handler, Handlers, Operation
from dynamo_local.core.errors import DynamoError, OrderError, OrderTooLargeError, SupervisorError
from state.files import FILE_MODE, system_errors

_BODY_S = 10.0
_CONNECTIONS = 256
_END_S = 2.0


class ControlApi:
    """Answers what has a handler; to what has none yet, that the server starts."""

    def __init__(self) -> None:
        self._handlers: dict[Operation, Handler] = {}
        self.app = Starlette(routes=[self._route(operation) for operation in OPERATIONS])

    def take(self, handlers: Handlers) -> None:
        """Have these answer from now on."""
        self._handlers.update(handlers)

    def _route(self, operation: Operation) -> Route:
        async def answer(request: Request) -> Response:
            try:
                content = await self._handler(operation)(await _call(request))
                return _response(content, operation.status)
            except DynamoError as error:
                return _response(content_of(error), status_of(error))

        return Route(operation.path, answer, methods=[operation.method], name=operation.name)

    def _handler(self, operation: Operation) -> Handler:
        handler = self._handlers.get(operation)
        if handler is None:
            raise SupervisorError(
                "the server is starting", "try again in a moment: `dynamo wait` waits until it is ready"
            )
        return handler


def _response(content: object, status: int) -> Response:
    if isinstance(content, Response):
        return content
    headers = {"retry-after": str(RETRY_S)} if status == UNAVAILABLE else None
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _call(request: Request) -> Call:
    headers, query = request.headers, dict(request.query_params)
    if LAST_EVENT_ID in headers:
        # Newer than what the address says: who reconnects asks for the same address again.
        query["after"] = headers[LAST_EVENT_ID]
    by, streams = unquote(headers.get(BY, "")), EVENT_STREAM in headers.get("accept", "")
    return Call(request.path_params, query, await _body(request), by, streams)


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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which has handlers of its own."""
        yield


class ControlSocket:
    """The socket on which the control API is answered, from its making until `close`."""

    def __init__(self, api: ControlApi, path: Path) -> None:
        """Bind. Raises StateError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with system_errors(f"cannot open {path}"):
            # The folder is closed to others from before the socket exists.
            self._socket.bind(str(path))
            path.chmod(FILE_MODE)
            # Whoever asks from here on is answered soon.
            self._socket.listen()
        config = uvicorn.Config(
            api.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=int(_END_S),
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Answer until `close`."""
        await self._server.serve([self._socket])

    async def close(self, running: asyncio.Task[None]) -> None:
        """Take no more questions, and finish those under way, for two seconds at most. `running`: runs `run`."""
        self._server.should_exit = True
        await asyncio.wait({running}, timeout=2 * _END_S)
        running.cancel()
        self._socket.close()
