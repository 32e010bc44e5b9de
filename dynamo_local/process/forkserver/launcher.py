"""`python -m dynamo_local.process.forkserver.launcher ARG...`: the process of a service, by way of the fork server.

ARG... is what `dynamo_local.process.main` takes. Signals are passed on to the forked process, and this one ends as that
one ends: with its exit code, or by its signal. When no fork server forks, this process becomes the service itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dynamo_local.core.errors import DecodeError, SupervisorError
from dynamo_local.core.names import NAMESPACE_ENV
from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.following import end_like, follow
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.exit_pipe import ExitPipe
from dynamo_local.process.groups import kill_group
from state.paths import StatePaths

_CONNECT_DEADLINE_S = 5.0
"""For a fork server that is being started, or started again."""

_BIRTH_DEADLINE_S = 60.0
"""For one that is still importing. Longer than any import takes that is worth waiting for."""

_STATUS_DEADLINE_S = 2.0
"""For the fork server to tell how its child ended, which it does at once if it is there."""

_LOOK_EVERY_S = 0.01


class _NoForkServerError(SupervisorError):
    """There is no fork server that forks for this process."""


class Fork:
    """The forked process, as its launcher sees it."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, leash: ExitPipe) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._connection = connection
        self._leash = leash

    def follow(self) -> int:
        """Pass signals on until it has ended. Returns its exit code, negative for a signal."""
        follow(self._pidfd)
        # What it has forked would hold on to its devices. (Its group cannot be another's: it was its leader.)
        kill_group(self._pid)
        return self._code()

    def _code(self) -> int:
        self._connection.settimeout(_STATUS_DEADLINE_S)
        with suppress(OSError, DecodeError):
            return protocol.receive(self._connection, protocol.Ended)[0].code
        # The fork server is gone. A process that ends without a word was killed, by whom it cannot be known any more.
        said = self._leash.last_word()
        return -signal.SIGKILL if said is None else said


def main() -> NoReturn:
    """Live as long as the service's process."""
    environ = dict(os.environ)
    die_as_environment_says()
    arguments = tuple(sys.argv[1:])
    # Told to end before there is anything to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        fork = ask_for_fork(arguments)
    except _NoForkServerError as error:
        print(f"warning: {error}; this process imports by itself", file=sys.stderr, flush=True)
        command = (sys.executable, "-m", "dynamo_local.process.main", *arguments)
        # As it was: this process is tied anew by what it becomes.
        os.execve(command[0], command, environ)
    end_like(fork.follow())


def ask_for_fork(arguments: tuple[str, ...]) -> Fork:
    """Raises _NoForkServerError."""
    leash = ExitPipe.make()
    try:
        connection = _connect()
        connection.settimeout(_BIRTH_DEADLINE_S)
        protocol.send(
            connection, protocol.Order(arguments, dict(os.environb), str(Path.cwd())), (0, 1, 2, *leash.childs)
        )
        answer, received = protocol.receive(connection, protocol.Answer, 1)
    except TimeoutError as error:
        raise _NoForkServerError(f"the fork server forks nothing within {_BIRTH_DEADLINE_S:g} s") from error
    except (OSError, DecodeError) as error:
        raise _NoForkServerError(f"the fork server forks nothing: {error}") from error
    finally:
        leash.give_away()
    if answer.pid is None or not received:
        raise _NoForkServerError(f"the fork server does not fork: {answer.refusal}")
    return Fork(answer.pid, received[0], connection, leash)


def _connect() -> socket.socket:
    path = StatePaths.of(os.environ[NAMESPACE_ENV], os.environ).forkserver_socket
    give_up_at = time.monotonic() + _CONNECT_DEADLINE_S
    while True:
        try:
            return protocol.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main()
