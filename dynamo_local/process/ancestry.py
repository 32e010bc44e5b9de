"""Ties processes to each other, so that none outlives its server: by the kernel's parent-death signal, and by death
pipes. Imports little: launchers wait for it."""

from __future__ import annotations

import fcntl
import os
import select
import signal

from dynamo_local.core.errors import SupervisorError

# Death pipes: the kernel kills a process when the process that holds the writing end of a pipe ends, however it ends.
#
# Unlike the parent-death signal, this works between processes that are not parent and child, and survives
# the death of processes in between. Nothing is ever written. The reader asks for a signal when the pipe changes
# (`O_ASYNC`, with SIGKILL as its signal), which the pipe does when its last writer is gone. The request is kept across
# execve as long as the descriptor stays open.

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


# Ties processes to their parents, so that no child survives its parent.
#
# A process that is killed by SIGKILL cannot end its children. So every process asks the kernel beforehand to be killed
# when its parent dies: prctl(2), PR_SET_PDEATHSIG. The kernel keeps the setting across execve and drops it at a fork,
# hence `die_with_parent` for the one and `prepare_forks` for the other. It sends the signal when the *thread* that
# forked ends: fork from the main thread.
#
# A watcher's process is tied to `dynamo serve` instead, by a death pipe: it is to survive its parent,
# which is circusd.

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

PARENT_PID_ENV = "DYN_PARENT_PID"
"""Set by the server in processes that end with their parent: pid of the parent."""


def die_with_parent(parent_pid: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent dies.

    `parent_pid`: the parent's pid as the parent knows it. If that process is not the parent any more, it died before
    the request was made, and this process ends here, with status 1.
    """
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_as_environment_says(*, across_exec: bool = False) -> None:
    """Tie this process to the one that its environment names, and remove the variables, which are not for its children.

    $DYN_DEATH_PIPE names the server of a watcher's process, else $DYN_PARENT_PID names the parent. Without either, this
    process is tied to its present parent. `across_exec`: this process is about to become another program.
    """
    pipe, parent = os.environ.pop(DEATH_PIPE_ENV, None), os.environ.pop(PARENT_PID_ENV, None)
    if pipe is not None:
        die_with_holder(pipe, across_exec=across_exec)
    else:
        die_with_parent(int(parent) if parent else None)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, which $DYN_PARENT_PID names, also once this
    process has become another program. Removes the variable, which is not for its children."""
    parent = os.environ.pop(PARENT_PID_ENV, None)
    die_with_parent(int(parent) if parent else None, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, in place of the system's init."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def prepare_forks() -> None:
    """Have every child that this process forks from now on, and their own children, die with its parent.

    A child also drops the descriptor by which the interpreter wakes the event loop at a signal. If it were shared, the
    parent would take the child's signals for its own.
    """
    parent = 0

    def remember_parent() -> None:
        nonlocal parent
        parent = os.getpid()

    def settle_child() -> None:
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)

    os.register_at_fork(before=remember_parent, after_in_child=settle_child)


def let_forks_lead_sessions() -> None:
    """Have each child that this process forks from now on lead a session of its own, which its own children join.

    For engines. Linux shares a core among sessions first (sched_autogroup, on in most distributions), and only then
    within each. An engine that computes on its cores in a session of its own competes there as one among few, and
    processes of other sessions that wake up beside it run first. In one session with all others it would slow them
    down; and before Linux 6.18.45 (https://github.com/ejc3/fcvm/pull/940) such a session could keep all other sessions
    from these cores for seconds, the longer, the more processes woke up in it.

    Such a child leaves this process's group. It ends with this process all the same: `prepare_forks`.
    """
    group = os.getpgrp()

    def lead() -> None:
        if os.getpgrp() == group:
            os.setsid()

    os.register_at_fork(after_in_child=lead)


def _prctl(name: str, option: int, value: int) -> None:
    # Only where it is needed: launchers, which have a death pipe, are not to wait for its import.
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise SupervisorError(f"prctl({name}) failed: {os.strerror(ctypes.get_errno())}")
