"""The control API of a server: what answers each question, and the socket that its owner alone can open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.control.errors import still_starting
from dynamo_local.control.operations import Call, Handler, Handlers, Operation
from dynamo_local.core.errors import StateError, UnansweredError
from state.files import FILE_MODE, system_errors

if TYPE_CHECKING:
    from dynamo_local.supervisor.control.http import HttpServer

_WAITING = 256
"""Connections that may wait until the server takes them."""
_END_S = 3.0


@dataclass(frozen=True)
class EventStream:
    """An answer that goes on: server-sent events. A reader that takes nothing for `taken_within_s` is cut."""

    content: AsyncIterator[bytes]
    taken_within_s: float


class ControlApi:
    """The handlers of all operations that can be answered now."""

    def __init__(self) -> None:
        self._handlers: dict[Operation, Handler] = {}

    def take(self, handlers: Handlers) -> None:
        """Have these answer from now on."""
        self._handlers.update(handlers)

    def withdraw(self, operations: Iterable[Operation]) -> None:
        """Have these not be carried out any more: the server stops."""
        self._handlers.update(dict.fromkeys(operations, _stopping))

    def handler(self, operation: Operation) -> Handler:
        """Return what answers. Raises UnansweredError while there is none."""
        found = self._handlers.get(operation)
        if found is None:
            raise still_starting()
        return found


async def _stopping(_: Call) -> None:
    raise UnansweredError("the server is stopping", "see `dynamo ls`")


class ControlSocket:
    """The socket on which a control API is answered, from its making until `close`."""

    def __init__(self, api: ControlApi, path: Path) -> None:
        """Bind: clients can connect from now on. Raises StateError."""
        self._api = api
        self._path = path
        self._server: HttpServer | None = None
        self._socket = self._bound()

    def _bound(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with system_errors(f"cannot open {self._path}"):
            # The folder is closed to others from before the socket exists.
            bound.bind(str(self._path))
            self._path.chmod(FILE_MODE)
            bound.listen(_WAITING)
        return bound

    def _bound_again(self) -> socket.socket | None:
        """Bind if the file was removed; None if it is there, or its folder is not there yet."""
        with suppress(StateError):
            return None if self._path.exists() else self._bound()
        return None

    async def run(self) -> None:
        """Answer until `close`."""
        self._server = await asyncio.to_thread(self._make_server)
        await self._server.serve([self._socket])

    def _make_server(self) -> HttpServer:
        # Here, in a thread: the import takes a fifth of a second, for which no process of the server is to wait.
        from dynamo_local.supervisor.control.http import HttpServer

        return HttpServer(self._api, self._bound_again)

    async def close(self, running: asyncio.Task[None]) -> None:
        """Take no more questions, and finish those under way, for a while. `running`: runs `run`."""
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({running}, timeout=_END_S)
        running.cancel()
        await asyncio.wait({running}, timeout=_END_S)
        self._socket.close()
