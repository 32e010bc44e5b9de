"""The source's side of a stream on which KV is read between machines, and what both sides say to each other."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import numpy as np

from dynamo_local.bus.certificate import Certificate, make_certificate
from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.agents import Pieces
from dynamo_local.engine.vllm.kv.pull.messages import FORGOTTEN_S

# What reader and source say to each other on a stream, inside TLS.
#
#     reader  MAGIC, secret                      once
#     reader  number, count, count pieces        each read, or a part of it
#     source  number, bytes, those bytes         for each, in the order in which they were asked for
#
# Numbers are little-endian; a piece is an address and a length, of 8 bytes each. A source that does not serve what it
# is asked for ends the connection. Sizes are bounded, where things come in.

MAGIC = b"DYNAMOKV"
SECRET_BYTES = 32
HELLO_BYTES = len(MAGIC) + SECRET_BYTES

REQUEST = struct.Struct("<QI")
REPLY = struct.Struct("<QQ")
PIECE_BYTES = 16
MOST_PIECES = 1 << 13
"""Of a request: 128 KiB."""
MOST_BYTES = 1 << 30
"""Of a reply."""

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class StreamAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a source listens, and how the two know each other. It crosses the bus, to members of the namespace alone.

    `fingerprint`: SHA-256 of the source's certificate (DER). `secret`: what a reader has to say first.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    fingerprint: _Digest
    secret: _Digest

    def __repr__(self) -> str:
        return f"StreamAddress({self.host!r}, {self.port})"


def requests_of(remote: Pieces) -> Iterator[tuple[slice, int]]:
    """Split a read into requests that a source takes: which pieces, and their bytes."""
    begin, size = 0, 0
    for index, length in enumerate(remote[:, 1].tolist()):
        if index > begin and (index - begin == MOST_PIECES or size + length > MOST_BYTES):
            yield slice(begin, index), size
            begin, size = index, 0
        size += length
    if begin < len(remote):
        yield slice(begin, len(remote)), size


def pack_request(number: int, pieces: Pieces) -> bytes:
    return REQUEST.pack(number, len(pieces)) + np.ascontiguousarray(pieces, dtype="<u8").tobytes()


def unpack_request(header: bytes) -> tuple[int, int]:
    """Number, and how many pieces follow. Raises EngineError."""
    number, count = REQUEST.unpack(header)
    if not 0 < count <= MOST_PIECES:
        raise EngineError(f"a reader of KV asks for {count} pieces at once")
    return number, count


def unpack_pieces(data: bytes) -> Pieces:
    pieces: Pieces = np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64)
    return pieces


# The memory that readers of a stream may ask for.

Range = tuple[int, int]
"""Address and length."""


class Ranges:
    """Memory of this process that does not go away before it is taken out. For several threads."""

    def __init__(self) -> None:
        self._ranges: tuple[Range, ...] = ()
        self._lent = 0
        self._changed = threading.Condition()

    def add(self, ranges: Iterable[Range]) -> None:
        with self._changed:
            self._ranges = (*self._ranges, *ranges)

    def remove(self, ranges: Iterable[Range]) -> None:
        """Lend them to nobody from now on; see `wait`."""
        gone = set(ranges)
        with self._changed:
            self._ranges = tuple(each for each in self._ranges if each not in gone)

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is lent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent, timeout_s)

    @contextmanager
    def lent(self, pieces: Pieces) -> Iterator[int]:
        """The context in which these pieces may be read; how many bytes they are. Raises EngineError, as `check`."""
        with self._changed:
            size = self.check(pieces)
            self._lent += 1
        try:
            yield size
        finally:
            with self._changed:
                self._lent -= 1
                self._changed.notify_all()

    def check(self, pieces: Pieces) -> int:
        """Returns how many bytes these are. Raises EngineError unless each lies within one range."""
        starts, lengths = pieces[:, 0], pieces[:, 1]
        inside = np.zeros(len(pieces), dtype=bool)
        for start, length in self._ranges:
            offsets = starts - np.uint64(start)
            # What begins before the range has a huge offset. No sum can overflow: a length is compared with what is
            # left.
            within = offsets < length
            inside |= within & (lengths > 0) & (lengths <= np.uint64(length) - np.where(within, offsets, np.uint64(0)))
        if not inside.all():
            raise EngineError("a reader asks for memory that is no KV")
        # Each is at most a range, so that their sum is exact in Python alone.
        total: int = sum(lengths.tolist())
        if total > MOST_BYTES:
            raise EngineError(f"a reader asks for {total} bytes at once")
        return total


def memory_of(pieces: Pieces) -> Iterator[memoryview]:
    """The bytes at these addresses of this process."""
    for address, length in pieces.tolist():
        yield memoryview((ctypes.c_char * length).from_address(address)).cast("B")


# The source's side of a stream: threads of an engine's process that serve reads of its KV.
#
# A thread for each connection, which waits for nothing but its reader. What a reader asks for is checked and sent; what
# it may then be worth is decided by the confirmation of its pin (decision 28), so nothing here waits for steps.

_log = logging.getLogger(__name__)

MOST_READERS = 64
MOST_STRANGERS = 16
"""Connections that have not shown the secret yet."""

_HELLO_S = 5.0
"""Time for TLS and the secret."""
_IDLE_S = 2 * FORGOTTEN_S
"""Time after which a connection ends on which nothing is asked. Readers forget a source earlier."""
_STALL_S = 10.0
"""Time for the rest of a request, and for a reader to take some more of what it asked for."""
_CHUNK_BYTES = 1 << 18


class StreamServer:
    """Serves reads on a port of its own, until `close`."""

    def __init__(self, host: str, prepare: Callable[[], None]) -> None:
        """`prepare` is called in each thread. Raises OSError if it cannot listen on that address."""
        certificate = make_certificate(host)
        self.ranges = Ranges()
        self._prepare = prepare
        self._context = _context(certificate)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._readers = threading.BoundedSemaphore(MOST_READERS)
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._open: set[ssl.SSLSocket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=MOST_STRANGERS)
        port: int = self._listening.getsockname()[1]
        self.address = StreamAddress(host, port, fingerprint_of(certificate), self._secret)
        threading.Thread(target=self._accept, name="KV stream", daemon=True).start()

    def register(self, ranges: Iterable[Range]) -> None:
        self.ranges.add(ranges)

    def deregister(self, ranges: Iterable[Range]) -> None:
        """End all reads, as some may be of this memory. Returns when nothing reads it any more."""
        self.ranges.remove(ranges)
        self._end_all()
        self.ranges.wait(_STALL_S)

    def close(self) -> None:
        self._closed.set()
        # A thread that waits in accept is not woken by close alone.
        _shut(self._listening)
        self._listening.close()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            for reader in self._open:
                _shut(reader)

    def _accept(self) -> None:
        self._prepare()
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed.is_set():
                    return
                # Descriptors are short, for example.
                time.sleep(0.1)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="KV stream reader", daemon=True).start()
            except RuntimeError as error:
                # Threads are short. This one must go on: without it nobody would ever be served again.
                _log.warning("a reader of KV was left: %s", error)
                connection.close()
                self._strangers.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                reader = self._greet(connection)
            finally:
                connection.close()
                self._strangers.release()
            with reader:
                self._serve_reader(reader)
        except (OSError, EngineError) as error:
            # ssl.SSLError is an OSError. Strangers may make many of these.
            _log.debug("a reader of KV was left: %s", error)

    def _greet(self, connection: socket.socket) -> ssl.SSLSocket:
        """Secure the connection, and hear the secret. Raises OSError, and EngineError if it is another one."""
        deadline = time.monotonic() + _HELLO_S
        connection.settimeout(_HELLO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secured = self._context.wrap_socket(connection, server_side=True)
        try:
            hello = _receive(secured, HELLO_BYTES, deadline)
            if not hmac.compare_digest(hello, MAGIC + self._secret):
                raise EngineError("it does not know the secret")
        except BaseException:
            secured.close()
            raise
        return secured

    def _serve_reader(self, reader: ssl.SSLSocket) -> None:
        if not self._readers.acquire(blocking=False):
            raise EngineError(f"{MOST_READERS} others read")
        try:
            with self._lock:
                self._open.add(reader)
            self._prepare()
            while not self._closed.is_set():
                self._serve_read(reader)
        finally:
            with self._lock:
                self._open.discard(reader)
            self._readers.release()

    def _serve_read(self, reader: ssl.SSLSocket) -> None:
        number, count = unpack_request(_receive(reader, REQUEST.size, time.monotonic() + _IDLE_S))
        pieces = unpack_pieces(_receive(reader, count * PIECE_BYTES, time.monotonic() + _STALL_S))
        reader.settimeout(_STALL_S)
        with self.ranges.lent(pieces) as size:
            reader.sendall(REPLY.pack(number, size))
            for memory in memory_of(pieces):
                for begin in range(0, len(memory), _CHUNK_BYTES):
                    reader.sendall(memory[begin : begin + _CHUNK_BYTES])


def fingerprint_of(certificate: Certificate) -> bytes:
    """SHA-256 of the one that the source shows (DER)."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.chain.decode())).digest()


def _context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No session is taken up again, and a reader that has asked nothing is sent nothing.
    context.num_tickets = 0
    # The key is on no disk: ssl reads files only.
    file = os.memfd_create("stream")
    try:
        os.write(file, certificate.chain + certificate.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


def _receive(connection: ssl.SSLSocket, size: int, deadline: float) -> bytes:
    """Receive just so much. Raises OSError, also when the other side has ended or the time is over."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (more := connection.recv_into(view[got:])):
            raise ConnectionResetError("it has ended")
        got += more
    return bytes(data)


def _shut(connection: socket.socket) -> None:
    # It may have ended already. Not ssl's own `shutdown`: what another thread sends meanwhile would go out as it is.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
