"""Requests of administrators that the server answers: its control API has the same paths."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from dynamo_local.control.client import ControlClient
from dynamo_local.control.errors import KINDS, RETRY_S, UNAVAILABLE, told_by
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.http.asgi import Scope
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.paths import USAGE
from state.paths import StatePaths

_ANSWER_S = 30.0
_OF_QUERIES = "!$%&'()*+,-./:;=?@_~"
_AT_ONCE = 8
"""Requests that wait for the server at a time: a thread each, of their own, so that no other work of the frontend waits
for them."""


class Forwarding:
    """Passes requests on to the server of a namespace, and returns status and body of its answer, or its refusal."""

    def __init__(self, paths: StatePaths) -> None:
        self._client = ControlClient(paths)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "control")

    async def __call__(self, scope: Scope, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        """`by`: name of the key of who asks."""
        method, path = scope["method"], quote(scope["path"])
        if scope["path"] == USAGE and (query := scope.get("query_string")):
            # Of orders, the query is for other parts of the server.
            path = f"{path}?{quote(query, safe=_OF_QUERIES)}"

        def send() -> tuple[int, bytes]:
            return self._client.send(method, path, body, by=by, timeout_s=_ANSWER_S)

        try:
            status, content = await asyncio.get_running_loop().run_in_executor(self._threads, send)
        except DynamoError as error:
            unsure = "" if method == "GET" else "; look at what is there before you order it again"
            return Refusal(503, f"the server does not answer: {error}{unsure}", "ServiceUnavailableError")
        told = told_by(content) if status >= 400 else None
        if told is None:
            return status, content
        retry = RETRY_S if status == UNAVAILABLE else None
        kind = KINDS.get(status, told.type)
        return Refusal(status, told.message, kind, told.param, retry)  # type: ignore[arg-type]  # as the API has it
