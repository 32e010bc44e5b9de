"""What launcher and fork server say to each other, over a unix stream socket in the server's private directory.

    launcher → fork server   Order, with five descriptors: stdin, stdout, stderr and the child's ends of the leash
    fork server → launcher   Answer, with a pidfd if it has forked; a refusal ends it
    fork server → launcher   Ended

A message is its length (4 bytes, big-endian) and then msgpack. Both ends run the same release, as they belong to one
server.
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
"""More than the kernel takes for arguments and environment of one process."""

_LENGTH = 4
_T = TypeVar("_T")


class Order(msgspec.Struct, frozen=True):
    """Fork a service's process. `argv`: what its host takes (process/main.py). `environ` is all of its environment."""

    argv: tuple[str, ...]
    environ: dict[bytes, bytes]
    cwd: str


class Answer(msgspec.Struct, frozen=True):
    """The forked process; or, without one, why there is none and will be none."""

    pid: int | None = None
    refusal: str = ""


class Ended(msgspec.Struct, frozen=True):
    """It is no more. `code` is negative for a signal."""

    code: int


def listen(path: Path) -> socket.socket:
    """A listening socket in place of any that is there. Its directory keeps others out."""
    listener = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    with _Short(path) as short:
        listener.bind(short)
    listener.listen(128)
    return listener


def connect(path: Path) -> socket.socket:
    """Raises OSError if nobody listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _Short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError when the other end is gone."""
    data = msgspec.msgpack.encode(message)
    # Descriptors travel with the first bytes, and the length always fits into the socket's buffer.
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH, "big")], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket, kind: type[_T], descriptors: int = 0) -> tuple[_T, list[int]]:
    """A message and the descriptors that came with it, which are the caller's to close.

    Raises DecodeError for what is none, OSError when the other end is gone or says nothing in time (TimeoutError).
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
    """Close all of them."""
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


class _Short:
    """A name for a path that is short enough for a unix socket, however long the path is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = -1

    def __enter__(self) -> str:
        self._directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)
