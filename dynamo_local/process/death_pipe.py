"""Death pipes: the kernel kills a process when the process that holds the writing end of a pipe ends, however it ends.

Unlike the parent-death signal (ancestry.py), this works between processes that are not parent and child, and survives
the death of processes in between. Nothing is ever written. The reader asks for a signal when the pipe changes
(`O_ASYNC`, with SIGKILL as its signal), which the pipe does when its last writer is gone. The request is kept across
execve as long as the descriptor stays open.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

from dynamo_local.core.errors import SupervisorError

DEATH_PIPE_ENV = "DYN_DEATH_PIPE"
"""Set by the server in each of its processes: pid, descriptor and inode of a pipe. The process ends when the pipe
closes, because the server has ended."""

_F_SETSIG = 10  # fcntl.h; Python knows the name on some builds only


class DeathPipe:
    """A death pipe, seen from the process that holds its writing end."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)

    @property
    def address(self) -> str:
        """The value of $DYN_DEATH_PIPE: pid, descriptor and inode. Other processes open the pipe through /proc, so that
        there is no file that could be deleted."""
        return f"{os.getpid()}:{self._reading}:{os.fstat(self._reading).st_ino}"

    def close(self) -> None:
        """Have the kernel kill all processes that are tied to this pipe. A second call does nothing."""
        for descriptor in (self._writing, self._reading):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self._writing = -1


def die_with_writer(reading: int) -> None:
    """Have the kernel SIGKILL this process when the last writing end of the pipe closes. If that has happened already,
    end here, with status 1."""
    fcntl.fcntl(reading, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(reading, 0)
    if poller.poll(0):
        os._exit(1)


def die_with_holder(address: str, *, across_exec: bool) -> None:
    """Tie this process to the process that holds a `DeathPipe`. If that is gone already, end here, with status 1.

    Each process opens the pipe for itself, because the request for a signal belongs to the open file description.
    Raises SupervisorError if this process may not open it.
    """
    holder, number, inode = map(int, address.split(":"))
    try:
        reading = os.open(f"/proc/{holder}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise SupervisorError(
            f"process {os.getpid()} may not look at process {holder}, with which it is to end",
            "run both with the same rights, and mount /proc",
        ) from error
    except OSError:
        os._exit(1)
    if os.fstat(reading).st_ino != inode:
        # The pid belongs to another process by now.
        os._exit(1)
    os.set_inheritable(reading, across_exec)
    die_with_writer(reading)
