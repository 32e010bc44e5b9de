"""The listening socket of the API: opened by the server, which hands it over to each frontend that starts.

Because the server keeps the socket open, connections that come while a frontend is replaced wait for its successor
instead of being refused, and several frontends can accept from the one socket: a frontend that hangs accepts none.

The server hands it over at an abstract unix socket, which needs no file that could be deleted. Other users can reach
such a socket, so each side asks the kernel whose process the other one is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress

from dynamo_local.core.errors import PortInUseError, SupervisorError

LISTENER_ENV = "DYN_HTTP_LISTENER"
"""Set by the server in the process of a frontend: name of the abstract unix socket at which it hands over the API's."""

_UNREAD_MS = 60_000
"""How long data sent to a client may remain unacknowledged, in milliseconds."""

_WITHIN_S = 10.0
"""The server hands over at once, unless it waits for a core."""

_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of the process at the other end (unix(7), SO_PEERCRED)."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not listening yet. Raises PortInUseError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off on the connections; otherwise it does not, and the
    # first token of every stream waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A client that does not read its answer is disconnected: its requests would never end.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port") from error
    return listener


class ListenerHolder:
    """The server's side: holds `listener`, and hands it over to processes of this user that ask at `name`."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        """Raises SupervisorError if the name cannot be bound."""
        self._listener = listener
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._door.bind(f"\0{name}")
            self._door.listen()
        except OSError as error:
            self.close()
            raise SupervisorError(
                f"the API's socket cannot be handed over: {error.strerror}", "allow abstract unix sockets"
            ) from error

    async def run(self) -> None:
        """Hand over until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asking, _ = await loop.sock_accept(self._door)
            with asking, suppress(OSError):
                if _peer_uid(asking) == os.geteuid():
                    # One byte into an empty buffer: this never blocks.
                    socket.send_fds(asking, [b"\0"], [self._listener.fileno()])

    def close(self) -> None:
        """Hand over no more. Once no frontend holds the socket either, connections are refused. May be called twice."""
        self._door.close()
        self._listener.close()


def take_over(name: str) -> socket.socket:
    """The frontend's side: return the API's socket, which listens if another frontend has it, or had it before. Blocks.

    Raises SupervisorError if the server does not hand it over.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_WITHIN_S)
        try:
            asking.connect(f"\0{name}")
            if _peer_uid(asking) != os.geteuid():
                raise PermissionError(None, "another user's process listens in its place")
            _, received, _, _ = socket.recv_fds(asking, 1, 1)
        except OSError as error:
            raise SupervisorError(
                f"the server does not hand over the API's socket: {error.strerror or error}", "see `dynamo logs`"
            ) from error
    if not received:
        raise SupervisorError("the server does not hand over the API's socket", "see `dynamo logs`")
    return socket.socket(fileno=received[0])


def _peer_uid(connection: socket.socket) -> int:
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])
