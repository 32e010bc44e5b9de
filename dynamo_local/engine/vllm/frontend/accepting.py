"""Accepts the connections of one process from a listening socket that several share: each gets its part of them.

The kernel wakes all of them for each connection, and asyncio's own server accepts all that wait, so the process that
looks first would have most. Here it takes one at a time, and one that has more than its part leaves it to the others
for a moment. It takes what nobody has taken then: a process that hangs or is busy keeps no client waiting for longer.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_local.core.http.bounds.connections import is_due
from dynamo_local.engine.vllm.frontend.http_connections import Others
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that wait to be accepted at most. As uvicorn's."""

YIELD_S = 0.005
"""How long a process leaves a connection to the others."""
_LOOK_S = 0.001
"""Between its looks whether they have taken it meanwhile, or have more themselves by now."""
_LEFT = 8
"""Connections that it takes at once when it has left one to them in vain."""
_AT_ONCE = 64
"""Connections that a process without others accepts in one turn of its loop."""
_OUT_OF_FILES_S = 1.0
_FILES_LOOK_S = 0.5
"""Between two looks at the files of TLS."""


def acceptor_of(server: Any, listener: socket.socket, others: Others) -> Acceptor:
    """Return what accepts connections for a uvicorn server."""
    config = server.config

    def protocol() -> asyncio.Protocol:
        # As uvicorn makes them for its own servers.
        state = server.lifespan.state
        made: asyncio.Protocol = config.http_protocol_class(
            config=config, server_state=server.server_state, app_state=state
        )
        return made

    return Acceptor(listener, protocol, lambda: config.ssl, others)


class Acceptor:
    """Accepts from `start` to `close`. Stands for one of uvicorn's servers, which closes it."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        others: Others,
    ) -> None:
        """`protocol`: makes that of a connection. `tls`: returns its context. The listener is closed with this."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._others = others
        self._pending = select.poll()
        self._resuming: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._log_once = LogOnce(_log)

    def start(self) -> None:
        """Begin to listen and to accept."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._others.note_accepting(True)
        self._pending.register(self._listener, select.POLLIN)
        self._loop.add_reader(self._listener, self._on_ready)

    def close(self) -> None:
        """Accept no more. What has been accepted goes on. May be called twice."""
        if self._listener.fileno() < 0:
            return
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._others.note_accepting(False)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Give up connections that are still being made."""
        for task in self._connecting:
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _on_ready(self) -> None:
        if not self._others.connections_elsewhere():
            self._accept_some(_AT_ONCE)
        elif self._is_due():
            self._accept()
        else:
            self._loop.remove_reader(self._listener)
            self._look_later(self._loop.time() + YIELD_S)

    def _look_later(self, until: float) -> None:
        """Leave a connection to the others, at most until then."""
        self._resuming = self._loop.call_later(_LOOK_S, self._look_again, until)

    def _look_again(self, until: float) -> None:
        self._resuming = None
        if self._pending.poll(0) and not self._is_due():
            if self._loop.time() < until:
                self._look_later(until)
                return
            self._accept_some(_LEFT)
        if self._resuming is None:
            self._resume()

    def _is_due(self) -> bool:
        return is_due(self._others.own_connections, self._others.connections_elsewhere())

    def _accept_some(self, most: int) -> None:
        for _ in range(most):
            if not self._accept():
                break

    def _accept(self) -> bool:
        """Accept a connection, if one waits."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._log_once.warn(f"no connection can be accepted: {error.strerror}")
            self._loop.remove_reader(self._listener)
            self._resuming = self._loop.call_later(_OUT_OF_FILES_S, self._resume)
            return False
        connection.setblocking(False)
        self._others.note_accepted()
        task = self._loop.create_task(self._connect(connection), name="accepted connection")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, connection: socket.socket) -> None:
        made = False
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls())
            made = True
        except OSError as error:
            # The client has left, or speaks no TLS.
            _log.debug("a connection has ended before its first byte: %s", error)
        finally:
            if not made:
                connection.close()
                self._others.note_given_up()

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listener, self._on_ready)


class Certificates:
    """Keeps the TLS context of a uvicorn configuration up to date with its files: certificate, key, authorities.

    New connections get the new context, those that are open keep theirs. Files that do not go together, such as a new
    certificate beside the old key, change nothing.
    """

    def __init__(self, config: Any) -> None:
        """`config`: a uvicorn.Config that has been loaded."""
        self._config = config
        self._paths = [path for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if path]
        self._last = self._taken = self._stamps()

    async def follow(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(_FILES_LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read files that have changed, once two looks have found the same: until then they are being written."""
        stamps = self._stamps()
        settled, self._last = stamps == self._last, stamps
        if not settled or stamps == self._taken:
            return
        self._taken = stamps
        try:
            self._config.ssl = self._context()
        except (OSError, ValueError) as error:
            _log.warning("the files of TLS have changed and cannot be used, the former certificate stays: %s", error)
        else:
            _log.warning("the files of TLS have changed: new connections get the new certificate")

    def _context(self) -> ssl.SSLContext:
        from uvicorn.config import create_ssl_context

        config = self._config
        return create_ssl_context(
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            password=config.ssl_keyfile_password,
            ssl_version=config.ssl_version,
            cert_reqs=config.ssl_cert_reqs,
            ca_certs=config.ssl_ca_certs,
            ciphers=config.ssl_ciphers,
        )

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return what tells each file from the one that was there before. None: there is no such file."""
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
