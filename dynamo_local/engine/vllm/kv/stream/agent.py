"""The reader's side of a stream, and an agent that reads KV of other machines on streams and serves its own."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.agents import Blocks, OwnAgent, Pieces, joined
from dynamo_local.engine.vllm.kv.stream.server import (
    MAGIC,
    REPLY,
    Range,
    StreamAddress,
    StreamServer,
    memory_of,
    pack_request,
    requests_of,
)

# The reader's side of a stream: reads of one source, posted together and received in their order straight into the
# reader's blocks.

_CONNECT_S = 3.0
"""Time for TCP and TLS. Nothing else is connected to meanwhile."""
STALL_S = 10.0
"""Time without a byte after which reads fail: the source is gone, or the network between."""
LONGEST_S = 60.0
"""Time for a read, however it comes. Nobody waits for it so long."""
_SLICE_BYTES = 1 << 22
"""Received at once, before other reads have their turn."""
_TURN_S = 0.02
_PAUSE_MS = 2
_RECORD_BYTES = 1 << 14
"""Of TLS: sent at once."""


@dataclass(eq=False)
class StreamRead:
    """A read of some pieces into others of the same lengths."""

    local: Pieces
    remote: Pieces
    ends_by: float = 0.0
    left: int = 0
    """Requests of it without an answer."""


@dataclass
class _Expected:
    """A reply that is to come. `targets`: where its bytes go, one after the other."""

    read: StreamRead
    targets: Iterator[memoryview]


@dataclass
class Connection:
    """A connection to a source. Its methods may be called by several threads. Once it has failed, or is closed, nothing
    is written to the reader's memory any more."""

    _socket: ssl.SSLSocket
    _error: str | None = None
    _out: bytearray = field(default_factory=bytearray)
    _expected: deque[_Expected] = field(default_factory=deque)
    _target: memoryview | None = None
    """What is left of where the next bytes go. None: nothing is to come."""
    _moved_at: float = 0.0
    """Time of the last progress."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def open(cls, address: StreamAddress) -> Connection:
        """Connect. Raises EngineError, also if another than that source answers, to whom no secret is said."""
        try:
            secured = _secured(address)
        except OSError as error:
            raise EngineError(f"the other machine's KV cannot be reached: {error}") from error
        secured.setblocking(False)
        connection = cls(secured)
        connection._out += MAGIC + address.secret
        # At once: the source does not wait for long, and the first read may come later.
        connection._advance()
        return connection

    def alive(self) -> bool:
        """Whether it can be read from, as far as is known."""
        with self._lock:
            if self._error is None and not self._expected:
                # Nothing is to come, so that what can be received is the end.
                self._advance()
            return self._error is None

    def post(self, read: StreamRead) -> None:
        """Ask for it. Raises EngineError."""
        with self._lock:
            self._check()
            now = time.monotonic()
            read.ends_by = now + LONGEST_S
            if not self._expected:
                self._moved_at = now
            for part, size in requests_of(read.remote):
                number = next(self._numbers)
                self._out += pack_request(number, read.remote[part])
                self._expected.append(_Expected(read, _targets(number, size, read.local[part])))
                read.left += 1
            self._advance()
            self._check()

    def has_ended(self, read: StreamRead) -> bool:
        """Receive what comes, for as long as it comes without a pause, and 20 ms at most. Returns whether this read has
        ended. Raises EngineError if it has failed."""
        until = time.monotonic() + _TURN_S
        while not self._look(read):
            if time.monotonic() >= until or not self._wait():
                return False
        return True

    def _wait(self) -> bool:
        """Whether something has come, or comes soon."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            # Closed meanwhile, as the next look will say.
            return True
        return bool(poll.poll(_PAUSE_MS))

    def _look(self, read: StreamRead) -> bool:
        with self._lock:
            if read.left:
                self._check()
                self._advance()
            if read.left:
                self._check()
            return not read.left

    def close(self, why: str = "it is closed") -> None:
        with self._lock:
            self._fail(why)

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"the other machine's KV cannot be read: {self._error}")

    def _fail(self, why: str) -> None:
        if self._error is None:
            self._error = why
            self._expected.clear()
            self._target = None
            self._socket.close()

    def _advance(self) -> None:
        try:
            self._send()
            self._receive()
        except (OSError, EngineError) as error:
            self._fail(str(error))
            return
        now = time.monotonic()
        if self._expected and now - self._moved_at > STALL_S:
            self._fail(f"nothing has come for {STALL_S:g} s")
        elif self._expected and now > self._expected[0].read.ends_by:
            self._fail(f"a read has not ended within {LONGEST_S:g} s")

    def _send(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(bytes(self._out[:_RECORD_BYTES]))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            del self._out[:sent]
            self._moved_at = time.monotonic()

    def _receive(self) -> None:
        left = _SLICE_BYTES
        while left > 0:
            target = self._target = self._target or self._next()
            try:
                # One byte where nothing is to come: of the end one is told then.
                got = self._socket.recv_into(memoryview(bytearray(1)) if target is None else target)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not got:
                raise EngineError("the source has ended the connection")
            if target is None:
                raise EngineError("the source says what it was not asked for")
            self._target = target[got:]
            left -= got
            self._moved_at = time.monotonic()

    def _next(self) -> memoryview | None:
        """Where the next bytes go. Raises EngineError if what has come is no answer."""
        while self._expected:
            target = next(self._expected[0].targets, None)
            if target is not None:
                return target
            self._expected.popleft().read.left -= 1
        return None


def _targets(number: int, size: int, local: Pieces) -> Iterator[memoryview]:
    header = bytearray(REPLY.size)
    yield memoryview(header)
    if REPLY.unpack(header) != (number, size):
        raise EngineError("the source answers something else than it was asked")
    yield from memory_of(local)


def _secured(address: StreamAddress) -> ssl.SSLSocket:
    """Connect, and see that it is the source which this address is of. Raises OSError."""
    plain = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secured = _context().wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    shown = secured.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).digest(), address.fingerprint):
        secured.close()
        raise ConnectionAbortedError("another than the source answers there, by its certificate")
    return secured


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The one certificate that counts is known by its fingerprint, which has come over the bus.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# An agent that reads KV of other machines on a TLS stream, and serves its own.


@dataclass(frozen=True)
class _Transfer:
    connection: Connection
    read: StreamRead


class StreamAgent(OwnAgent):
    """Stand in for a NIXL agent, as `MemoryAgent`. Memory is ordinary memory."""

    def __init__(self, host: str, prepare: Callable[[], None]) -> None:
        """`host`: address of this machine at which others reach it. `prepare` is called in each thread that serves.
        Raises EngineError."""
        super().__init__()
        try:
            self._server = StreamServer(host, prepare)
        except OSError as error:
            raise EngineError(f"KV cannot be served at {host}: {error}") from error

    def get_reg_descs(self, ranges: Any, memory: str) -> list[Range]:
        """`ranges` are rows of address, length, device and a name."""
        return [(int(row[0]), int(row[1])) for row in ranges]

    def register_memory(self, ranges: list[Range]) -> None:
        """Let other machines read it."""
        self._server.register(ranges)

    def deregister_memory(self, ranges: list[Range]) -> None:
        """Let nobody read it. Reads under way fail."""
        self._server.deregister(ranges)

    def get_agent_metadata(self) -> bytes:
        """Say how this process is read. It has a secret."""
        return msgspec.msgpack.encode(self._server.address)

    def add_remote_agent(self, metadata: bytes) -> str:
        """Connect. Raises msgspec.DecodeError, and EngineError if it cannot be reached."""
        address = msgspec.msgpack.decode(metadata, type=StreamAddress)
        name = f"{address.host}:{address.port}-{address.fingerprint.hex()[:16]}"
        self.remove_remote_agent(name)
        self._sources[name] = Connection.open(address)
        return name

    def remove_remote_agent(self, name: str) -> None:
        if (connection := self._sources.pop(name, None)) is not None:
            connection.close()

    def make_prepped_xfer(
        self, operation: str, local: Blocks, local_indices: Any, remote: Blocks, remote_indices: Any
    ) -> _Transfer:
        assert operation == "READ"
        assert remote.source is not None
        pieces = joined(local.pieces[local_indices], remote.pieces[remote_indices])
        return _Transfer(remote.source, StreamRead(*pieces))

    def transfer(self, transfer: _Transfer) -> str:
        """Ask for it. Raises EngineError."""
        transfer.connection.post(transfer.read)
        return "PROC"

    def check_xfer_state(self, transfer: _Transfer) -> str:
        """Receive what has come. Raises EngineError."""
        return "DONE" if transfer.connection.has_ended(transfer.read) else "PROC"

    def release_xfer_handle(self, transfer: _Transfer) -> None:
        """Take back a read that has not ended: by the end of its connection, which all that is read there shares."""
        if transfer.read.left:
            transfer.connection.close("a read of it was taken back")

    def close(self) -> None:
        """End all connections, and serve no more."""
        for name in list(self._sources):
            self.remove_remote_agent(name)
        self._server.close()
