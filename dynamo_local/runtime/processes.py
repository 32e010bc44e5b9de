"""No child survives its parent.

A process that is SIGKILLed cannot tell anybody, so every process asks the kernel beforehand to be killed when its
parent dies: prctl(2), PR_SET_PDEATHSIG. The setting is kept across execve and lost across fork, hence the two
functions. The signal comes when the *thread* that forked ends: fork from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

from dynamo_local.core.errors import SupervisorError

_PR_SET_PDEATHSIG = 1

PARENT_PID_ENV = "DYN_PARENT_PID"
"""Names the process that must be the parent. Set by whoever starts a watcher's process."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent dies.

    The parent may have died before the request was made: then `parent_pid` (what the parent said of itself) is no
    longer the parent, and this process ends here, with status 1.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise SupervisorError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_parent_from_environment() -> None:
    """`die_with_parent` with the parent named by $DYN_PARENT_PID; without it, with whoever is the parent now."""
    parent = os.environ.get(PARENT_PID_ENV)
    die_with_parent(int(parent) if parent else None)


def prepare_forks() -> None:
    """Make it safe for this process, and for its children, to fork from now on.

    A forked child dies with its parent. It also lets go of the descriptor by which the interpreter wakes the event
    loop at a signal: shared with the parent, the child's signals would be taken for the parent's.
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
    """Have each process that is forked from this one from now on lead a session, in which those stay that it forks.

    Linux shares a core among sessions first (sched_autogroup, on in most distributions), and only then within each. A
    session that keeps to its cores and computes there is one among few, and others that wake up beside it go first. In
    one with them, on all cores, it was not so, and before Linux 6.18.45 (https://github.com/ejc3/fcvm/pull/940) such a
    session kept all other ones from these cores for seconds: the more processes woke up in it, the longer.

    Such a process is no member of this one's group any more. It ends with this one nevertheless: `prepare_forks`.
    """
    group = os.getpgrp()

    def lead() -> None:
        if os.getpgrp() == group:
            os.setsid()

    os.register_at_fork(after_in_child=lead)
