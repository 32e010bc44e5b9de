"""`python -m dynamo_local.process.forkserver.launcher ARG...`: runs a service by way of the fork server.

ARG... are the arguments of `dynamo_local.process.main`. The launcher passes signals on to the forked process, and ends
as it ends: with its exit code, or by its signal. If no fork server forks, the launcher becomes the service itself.

A service starts no sooner than its launcher, which therefore imports little until it has sent its order.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress

from dynamo_local.core.errors import DecodeError, SupervisorError
from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.protocol import ExitPipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_CONNECT_DEADLINE_S = 5.0
"""For connecting. The fork server may be starting, or be restarted."""

_CONNECT_TO_FORK_DEADLINE_S = 60.0
"""The same, where fork servers are forked from a process of tests. Such a one listens later, on a machine that starts
many servers at a time."""

_FORK_DEADLINE_S = 60.0
"""For the answer of a fork server that is still importing. A longer import is not worth waiting for."""

_IDLE_DEADLINE_S = 5.0
"""For the answer of a process that does nothing else than fork."""

_STATUS_DEADLINE_S = 2.0
"""For the fork server to send the exit code of its child, which it does at once if it is there."""

_RETRY_S = 0.01


class _NoForkServerError(SupervisorError):
    """No fork server forks for this process."""


class Fork:
    """The forked process, seen from its launcher. `connection`: to the fork server."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, exit_pipe: ExitPipe) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._connection = connection
        self._exit_pipe = exit_pipe

    def follow(self) -> int:
        """Pass signals on until the fork has ended. Returns its exit code, negative for a signal."""
        from dynamo_local.process.following import follow
        from dynamo_local.process.groups import kill_group

        follow(self._pidfd)
        # Its children would keep its devices. The group is still the fork's: its number is free once it is empty only.
        kill_group(self._pid)
        return self._exit_code()

    def _exit_code(self) -> int:
        self._connection.settimeout(_STATUS_DEADLINE_S)
        with suppress(OSError, DecodeError):
            return protocol.receive(self._connection, protocol.Ended)[0].code
        # The fork server is gone. A process that has written no exit code was killed; the signal cannot be known.
        code = self._exit_pipe.read_exit_code()
        return -signal.SIGKILL if code is None else code


def main() -> NoReturn:
    """Have the service forked, and follow its process until it ends."""
    environ = dict(os.environ)
    die_as_environment_says()
    arguments = tuple(sys.argv[1:])
    # A signal may come before there is a fork to pass it on to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        fork = ask_for_fork(arguments)
    except _NoForkServerError as error:
        print(f"warning: {error}; this process imports by itself", file=sys.stderr, flush=True)
        command = (sys.executable, "-m", "dynamo_local.process.main", *arguments)
        # With the original environment: process.main ties this process to its server again.
        os.execve(command[0], command, environ)
    from dynamo_local.process.following import end_like

    end_like(fork.follow())


def ask_for_fork(arguments: tuple[str, ...]) -> Fork:
    """Have a process forked for this launcher: from the one that has loaded its model's weights, if there is one, else
    from the fork server. Raises _NoForkServerError."""
    forkserver = os.environ.get(protocol.FORKSERVER_ENV)
    if forkserver is None:
        raise _NoForkServerError(f"{protocol.FORKSERVER_ENV} names no fork server")
    prepared = os.environ.get(protocol.PREPARED_ENV, "")
    fork = ask_if_there(prepared, arguments, "no fork with loaded weights ({}); this process loads them")
    return fork or _ask(arguments, lambda: _connect(forkserver), _FORK_DEADLINE_S)


def ask_if_there(path: str, arguments: tuple[str, ...], if_not: str) -> Fork | None:
    """Have a process forked by the one that listens at the path and does nothing else. None if there is no such socket,
    or no fork: that is said, with the reason."""
    if not os.path.exists(path):  # noqa: PTH110
        return None
    try:
        return _ask(arguments, lambda: protocol.connect(path), _IDLE_DEADLINE_S)
    except _NoForkServerError as error:
        print(f"warning: {if_not.format(error)}", file=sys.stderr, flush=True)
        return None


def _ask(arguments: tuple[str, ...], connect: Callable[[], socket.socket], deadline_s: float) -> Fork:
    """Raises _NoForkServerError."""
    exit_pipe = ExitPipe.make()
    order = protocol.Order(arguments, dict(os.environb), os.getcwd())  # noqa: PTH109
    with ExitStack() as failed:
        # A process that is forked nevertheless, later, is killed as it begins: its death pipe is closed.
        failed.callback(exit_pipe.close)
        try:
            connection = connect()
            failed.callback(connection.close)
            connection.settimeout(deadline_s)
            protocol.send(connection, order, (0, 1, 2, *exit_pipe.for_child))
            answer, received = protocol.receive(connection, protocol.Answer, 1)
        except TimeoutError as error:
            raise _NoForkServerError(f"the fork server forks nothing within {deadline_s:g} s") from error
        except (OSError, DecodeError) as error:
            raise _NoForkServerError(f"the fork server forks nothing: {error}") from error
        finally:
            exit_pipe.close_childs()
        if answer.pid is None or not received:
            raise _NoForkServerError(f"the fork server does not fork: {answer.refusal}")
        failed.pop_all()
    return Fork(answer.pid, received[0], connection, exit_pipe)


def _connect(path: str) -> socket.socket:
    forked = protocol.IMPORTED_ENV in os.environ
    give_up_at = time.monotonic() + (_CONNECT_TO_FORK_DEADLINE_S if forked else _CONNECT_DEADLINE_S)
    while True:
        try:
            return protocol.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    main()
