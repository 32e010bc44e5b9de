"""Asks a server on this machine: HTTP over its unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from dynamo_local.control.errors import absent_server, error_of, why_absent
from dynamo_local.control.operations import Operation
from dynamo_local.core.errors import NotRunningError, UnansweredError, UsageError
from state.files import sockets_of
from state.namespaces import find_servers, is_running
from state.paths import StatePaths

ANSWER_S = 15.0
"""Time for an answer. Orders are answered when they are durable, before they are carried out."""
BY = "x-dynamo-key"
"""Header with the name of the API key of who orders."""
EVENT_STREAM = "text/event-stream"
LAST_EVENT_ID = "last-event-id"


class UnixConnection(http.client.HTTPConnection):
    """A connection on a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ControlClient:
    """Asks the server of a namespace, on a connection for each question. Blocks."""

    def __init__(self, paths: StatePaths) -> None:
        self.paths = paths

    def do(
        self,
        operation: Operation,
        fields: Any = None,
        *,
        query: Mapping[str, str | None] | None = None,
        timeout_s: float = ANSWER_S,
        **names: str,
    ) -> Any:
        """Have something done, and return the content of the answer. `fields`: the body; `query`: None for what is left
        out; `names`: those in the path.

        Raises NotRunningError when no server runs, UnansweredError when it does not answer, UsageError when it refuses,
        SupervisorError when it cannot do it.
        """
        given = {key: value for key, value in (query or {}).items() if value is not None}
        path = operation.path_for(names) + (f"?{urlencode(given)}" if given else "")
        body = b"" if fields is None else _encoded(fields)
        status, content = self.send(operation.method, path, body, timeout_s=timeout_s)
        if status >= http.client.BAD_REQUEST:
            raise error_of(status, content)
        return msgspec.json.decode(content)

    def send(
        self, method: str, path: str, body: bytes, *, by: str = "", timeout_s: float = ANSWER_S
    ) -> tuple[int, bytes]:
        """Send a request, and return status and content of the answer. Raises NotRunningError, UnansweredError."""
        connection = UnixConnection(str(sockets_of(self.paths).control), timeout_s)
        try:
            connection.request(method, path, body or None, {BY: quote(by)} if by else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered() from error
        finally:
            connection.close()

    def _unanswered(self) -> NotRunningError | UnansweredError:
        namespace = self.paths.namespace
        if not is_running(self.paths):
            return absent_server(namespace, find_servers(self.paths.root))
        if not sockets_of(self.paths).control.exists():
            return why_absent(self.paths)
        return UnansweredError(
            f"the server in namespace {namespace} does not answer", "it may be stopping: see `dynamo ls`"
        )


def _encoded(fields: Any) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False, default=msgspec.to_builtins).encode()
    except ValueError as error:
        # As null it would mean something else.
        raise UsageError("a number that is given is not finite", "write another one") from error
