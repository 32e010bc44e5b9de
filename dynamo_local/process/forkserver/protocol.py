"""The protocol of launcher and fork server, over a unix stream socket in the server's private directory.

    launcher → fork server   Order, with five descriptors: stdin, stdout, stderr and the child's ends of the exit pipe
    fork server → launcher   Answer, with a pidfd if it has forked; a refusal is the last message
    fork server → launcher   Ended

A message is its length (4 bytes, big-endian) followed by msgpack. Both ends belong to one server, so they are of the
same release.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_local.core.errors import DecodeError

FORKED_DESCRIPTORS = 5
MAX_BYTES = 4 * 1024 * 1024
"""The limit of a message: more than the kernel accepts as arguments and environment of a process."""

_LENGTH = 4
_T = TypeVar("_T")


class Order(msgspec.Struct, frozen=True):
    """The order to fork a service's process. `argv`: arguments of process/main.py. `environ`: its whole environment."""

    argv: tuple[str, ...]
    environ: dict[bytes, bytes]
    cwd: str


class Answer(msgspec.Struct, frozen=True):
    """The pid of the forked process; or None, and the reason why none is forked."""

    pid: int | None = None
    refusal: str = ""


class Ended(msgspec.Struct, frozen=True):
    """The end of the forked process. `code` is its exit code, negative for a signal."""

    code: int


def listen(path: Path) -> socket.socket:
    """Listen at the path, in place of any earlier socket. The directory's mode keeps other users out."""
    listener = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    with _ShortPath(path) as short:
        listener.bind(short)
    listener.listen(128)
    return listener


def connect(path: Path) -> socket.socket:
    """Connect to the path. Raises OSError if no process listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _ShortPath(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors. Raises OSError when the other end is gone."""
    data = msgspec.msgpack.encode(message)
    # With the length, and not with the data: so short a message always fits into the socket's buffer in one piece.
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH, "big")], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket, kind: type[_T], descriptors: int = 0) -> tuple[_T, list[int]]:
    """Receive a message and the descriptors that come with it, which the caller must close.

    Raises DecodeError for what is no message, OSError when the other end is gone, TimeoutError (an OSError) when
    nothing comes in time.
    """
    header, received, _, _ = socket.recv_fds(connection, _LENGTH, descriptors)
    try:
        header += _read(connection, _LENGTH - len(header))
        length = int.from_bytes(header, "big")
        if length > MAX_BYTES:
            raise DecodeError(f"a message of {length} bytes is too long")
        message = msgspec.msgpack.decode(_read(connection, length), type=kind)
    except msgspec.DecodeError as error:
        close(received)
        raise DecodeError(f"not a message between launcher and fork server: {error}") from error
    except BaseException:
        close(received)
        raise
    return message, received


def close(descriptors: Sequence[int]) -> None:
    """Close all of the descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length > 0:
        part = connection.recv(length)
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class _ShortPath:
    """A context manager that gives a name of a path, short enough for a unix socket, however long the path is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = -1

    def __enter__(self) -> str:
        self._directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)
