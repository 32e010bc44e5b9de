"""The protocol of launcher and fork server, over a unix stream socket in the server's private directory.

    launcher → fork server   Order, with five descriptors: stdin, stdout, stderr and the child's ends of the exit pipe
    fork server → launcher   Answer, with a pidfd if it has forked; a refusal is the last message
    fork server → launcher   Ended

A message is its length (4 bytes, big-endian) followed by fields that a NUL separates. Both ends belong to one server,
so they are of the same release.

The launcher imports this, and a service starts no sooner than its launcher: it needs nothing that is slow to import,
such as msgspec, dataclasses and pathlib.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress

from dynamo_local.core.errors import DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol, Self, TypeVar

    class _Message(Protocol):
        """A message as text: `fields` contain no NUL."""

        def fields(self) -> Sequence[bytes]: ...

        @classmethod
        def of(cls, fields: Sequence[bytes]) -> Self:
            """Raises ValueError for other fields."""

    _T = TypeVar("_T", bound=_Message)

FORKSERVER_ENV = "DYN_FORKSERVER"
"""Set by the server in each process that is to be forked: the fork server's socket."""

PREPARED_ENV = "DYN_PREPARED"
"""Set by the server in each process that is to be forked: the socket of the process that has loaded the weights of its
model, if there is one."""

IMPORTED_ENV = "DYN_IMPORTED"
"""Socket of a process that has imported what fork servers import, and is forked for them (`python -m tests.imported`):
the test suites' many servers import vLLM once. Without one, which is usual, each server's fork server imports."""

SPARE_MODULE = "dynamo_local.process.forkserver.spare"
"""Shown by /proc as the command of a spare, by which others recognise it."""

FORKED_DESCRIPTORS = 5
MAX_BYTES = 4 * 1024 * 1024
"""The limit of a message: more than the kernel accepts as arguments and environment of a process."""

_LENGTH = 4
_NUL = b"\0"


class Order:
    """The order to fork a process. `argv`: arguments of its program, which is process/main.py for a service, and
    __main__.py for a fork server. `environ`: its whole environment."""

    def __init__(self, argv: Sequence[str], environ: Mapping[bytes, bytes], cwd: str) -> None:
        self.argv = tuple(argv)
        self.environ = dict(environ)
        self.cwd = cwd

    def fields(self) -> Sequence[bytes]:
        variables = (name + b"=" + value for name, value in self.environ.items())
        arguments = map(os.fsencode, self.argv)
        return (b"%d" % len(self.argv), *arguments, os.fsencode(self.cwd), *variables)

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Order:
        end = 1 + int(fields[0])
        if not 1 <= end < len(fields):
            raise ValueError("an order has its arguments and a directory")
        variables = (field.partition(b"=") for field in fields[end + 1 :])
        environ = {name: value for name, _, value in variables}
        return cls(tuple(map(os.fsdecode, fields[1:end])), environ, os.fsdecode(fields[end]))


class Answer:
    """The pid of the forked process; or None, and the reason why none is forked."""

    def __init__(self, pid: int | None = None, refusal: str = "") -> None:
        self.pid = pid
        self.refusal = refusal

    def fields(self) -> Sequence[bytes]:
        return (b"" if self.pid is None else b"%d" % self.pid, self.refusal.encode(errors="replace"))

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Answer:
        pid, refusal = fields
        return cls(int(pid) if pid else None, refusal.decode())


class Ended:
    """The end of the forked process. `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        self.code = code

    def fields(self) -> Sequence[bytes]:
        return (b"%d" % self.code,)

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Ended:
        (code,) = fields
        return cls(int(code))


def listen(path: str) -> socket.socket:
    """Listen at the path, in place of any earlier socket. The directory's mode keeps other users out."""
    listener = socket.socket(socket.AF_UNIX)
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
    with _ShortPath(path) as short:
        listener.bind(short)
    listener.listen(128)
    return listener


def connect(path: str) -> socket.socket:
    """Connect to the path. Raises OSError if no process listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _ShortPath(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: _Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors. Raises OSError when the other end is gone."""
    data = _NUL.join(message.fields())
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
        message = kind.of(_read(connection, length).split(_NUL))
    except ValueError as error:
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

    def __init__(self, path: str) -> None:
        self._folder, self._name = os.path.split(path)
        self._directory = -1

    def __enter__(self) -> str:
        self._directory = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{self._name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)


# Ties a forked process to its launcher, which is not its parent, so that neither outlives the other.
#
# There are two pipes. The first is a death pipe (process/ancestry.py), whose writing end the launcher holds. Into the
# second the child writes its exit code, which the launcher reads if the fork server is gone and cannot tell it.


class ExitPipe:
    """The descriptors of both pipes. `for_child`: the ends of the child, which the launcher sends to it: that of the
    death pipe, and the one to write the exit code to."""

    def __init__(self, death_pipe: int, exit_code: int, for_child: tuple[int, int]) -> None:
        self.death_pipe = death_pipe
        self.exit_code = exit_code
        self.for_child = for_child

    @classmethod
    def make(cls) -> ExitPipe:
        childs_death_pipe, death_pipe = os.pipe2(os.O_CLOEXEC)
        exit_code, childs_exit_code = os.pipe2(os.O_CLOEXEC)
        return cls(death_pipe, exit_code, (childs_death_pipe, childs_exit_code))

    def close_childs(self) -> None:
        """Close the child's ends in the launcher, once they were sent."""
        for descriptor in self.for_child:
            os.close(descriptor)

    def close(self) -> None:
        """Close the launcher's own ends. The kernel kills a child that has the others."""
        for descriptor in (self.death_pipe, self.exit_code):
            os.close(descriptor)

    def read_exit_code(self) -> int | None:
        """The child's exit code; None if it ended without writing one. Call once the child is gone."""
        ready, _, _ = select.select([self.exit_code], [], [], 0)
        written = os.read(self.exit_code, 1) if ready else b""
        return written[0] if written else None


def write_exit_code(descriptor: int, code: int) -> None:
    """Write the child's exit code for its launcher. Harmless if the launcher is gone."""
    try:
        os.write(descriptor, bytes([code & 0xFF]))
    except BrokenPipeError:
        return
