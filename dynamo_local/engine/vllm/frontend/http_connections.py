"""uvicorn's HTTP connections with bounds: their number, how long a client may take for the head of a request, and how
large that may be; and their acceptance. uvicorn itself, over httptools, has none of these.

The gate bounds how long a body may take, and the size of a head that has come as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dynamo_local.core.beats import BEAT_S, until_beat
from dynamo_local.core.http.asgi import CROWDED
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.bounds.connections import ConnectionSlots, is_due
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

RESERVE = 32
"""Connections beyond the limit, on which monitoring is answered and all else refused."""

_OTHER_FILES = 256
"""Files that the process has open beside connections."""


class Others(Protocol):
    """The connections of other processes that accept from the same socket. One limit holds for all together."""

    @property
    def other_connections(self) -> int:
        """Their number."""

    @property
    def own_connections(self) -> int:
        """The number of this process's."""

    def connections_elsewhere(self) -> Sequence[int]:
        """The number of connections of each other process that accepts."""

    def note_accepting(self, accepts: bool) -> None:
        """Tell them whether this process accepts."""

    def note_accepted(self) -> None:
        """Count a connection of this process that has been accepted, until its number is noted."""

    def note_given_up(self) -> None:
        """Take back `note_accepted`: the connection has ended before it was made, in its TLS handshake for example."""

    def exclusively(self) -> AbstractContextManager[None]:
        """Let no other process add one meanwhile."""

    def note_connections(self, number: int) -> None:
        """Tell them how many this process has."""

    def note_crowded(self) -> None:
        """Tell them that there was no room here, and no connection that could make room."""

    def crowded_elsewhere(self) -> bool:
        """Whether one of them has told so since the last call."""


class Connections:
    """Set of all connections of one server."""

    def __init__(self, limits: AdmissionLimits, others: Others) -> None:
        self.limits = limits
        self._others = others
        self._looks = self._owes_room = False
        self.room: ConnectionSlots[BoundedProtocol] = ConnectionSlots(_affordable(limits.max_connections))
        self.reserve: ConnectionSlots[BoundedProtocol] = ConnectionSlots(RESERVE)

    @property
    def protocol(self) -> Any:
        """Protocol for uvicorn's option `http`."""
        return partial(BoundedProtocol, self)

    def enter(self, connection: BoundedProtocol, loop: asyncio.AbstractEventLoop) -> ConnectionSlots[Any] | None:
        """Return where the connection has room; None: nowhere."""
        with self._others.exclusively():
            elsewhere = self._others.other_connections
            if self._enters(self.room, connection, loop.time(), elsewhere):
                self._others.note_connections(len(self.room))
                self._look_again(loop)
                return self.room
        if elsewhere:
            self._others.note_crowded()
        return self.reserve if self._enters(self.reserve, connection, loop.time()) else None

    def leave(self, room: ConnectionSlots[BoundedProtocol], connection: BoundedProtocol) -> None:
        """The connection is closed."""
        room.leave(connection)
        self._others.note_connections(len(self.room))

    @staticmethod
    def _enters(
        room: ConnectionSlots[BoundedProtocol], connection: BoundedProtocol, now: float, elsewhere: int = 0
    ) -> bool:
        entered, leaving = room.enter(connection, now, elsewhere)
        if leaving is not None:
            leaving.transport.abort()
        return entered

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look from time to time, as long as there are connections, whether one has to make room."""
        if not self._looks:
            self._looks = True
            loop.call_later(until_beat(loop.time(), BEAT_S), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looks = False
        self._owes_room = self._others.crowded_elsewhere() or self._owes_room
        if self._owes_room and (leaving := self.room.leave_longest(loop.time())) is not None:
            self._owes_room = False
            leaving.transport.abort()
            self._others.note_connections(len(self.room))
        if len(self.room):
            self._look_again(loop)


class BoundedProtocol(HttpToolsProtocol):
    """Connection with these bounds. patches/table.py lists the methods of uvicorn's that it overrides."""

    def __init__(self, all_of_them: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = all_of_them.limits
        self._all = all_of_them
        self._room = all_of_them.room
        self._deadline: asyncio.TimerHandle | None = None
        self._unfinished = 0
        """Bytes received since the last end of a head, or piece of a body."""
        self._in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._enter():
            transport.abort()
            return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self._room, self)
        self._unset_deadline()
        # uvicorn leaves it set where the connection ends with an error.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unfinished > self._limits.max_header_bytes:
            why = f"path and headers are larger than {self._limits.max_header_bytes} bytes (setting max-header-bytes)"
            self._refuse(Refusal(431, why, "BadRequestError"))
        elif self._deadline is None and not self._answering:
            # Either the next head has begun, or what is left of a body that nobody reads any more.
            self._set_deadline()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind a body in chunks is read in the same way, and is no header.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unfinished = False, 0
        self._unset_deadline()
        super().on_headers_complete()
        if self._room is self._all.reserve:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        if self._answering:
            self._room.served(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering:
            self._room.waits(self, self.loop.time())

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: uvicorn warns at each such request, and clients could fill the log."""

    @property
    def _answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn says
        return cycle is not None and not cycle.response_complete

    def _enter(self) -> bool:
        room = self._all.enter(self, self.loop)
        if room is None:
            return False
        self._room = room
        if room is self._all.reserve:
            self.app_state = {**self.app_state, CROWDED: True}
        return True

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._limits.header_timeout_s, self._is_late)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._in_head:
            why = (
                f"path and headers have not come within {self._limits.header_timeout_s:g} s (setting header-timeout-s)"
            )
            self._refuse(Refusal(408, why, "RequestTimeoutError"))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what is no request yet, unless an answer is under way, and end the connection."""
        if not self._answering:
            body = refusal.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.transport.close()


def _affordable(wanted: int) -> int:
    """Lower the number of connections to the files that may be open. Raises that limit first, where allowed."""
    needed = wanted + RESERVE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            _log.warning("max-connections is %d here: more files may not be open (ulimit -n)", wanted - (needed - most))
            return max(1, wanted - (needed - most))
    return wanted


# Accepts the connections of one process from a listening socket that several share: each gets its part of them.
#
# The kernel wakes all of them for each connection, and asyncio's own server accepts all that wait, so the process that
# looks first would have most. Here it takes one at a time, and one that has more than its part leaves it to the others
# for a moment. It takes what nobody has taken then: a process that hangs or is busy keeps no client waiting for longer.

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
