"""No child survives its parent.

A process that is SIGKILLed cannot tell anybody, so every process asks the kernel beforehand to be killed when its
parent dies: prctl(2), PR_SET_PDEATHSIG. The setting is kept across execve and lost across fork, hence the two
functions. The signal comes when the *thread* that forked ends: fork from the main thread.

A watcher's process is tied to `dynamo serve` instead, by a death pipe (death_pipe.py): its parent is circusd, whose
death it survives.
"""

from __future__ import annotations

import ctypes
import os
import signal

from dynamo_local.core.errors import SupervisorError
from dynamo_local.process.death_pipe import DEATH_PIPE_ENV, die_with_holder

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

PARENT_PID_ENV = "DYN_PARENT_PID"
"""Set by the server in processes that end with their parent: pid of the parent."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent dies.

    The parent may have died before the request was made: then `parent_pid` (what the parent said of itself) is no
    longer the parent, and this process ends here, with status 1.
    """
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_as_environment_says(*, across_exec: bool = False) -> None:
    """Tie this process to the one that its environment names, and remove the name: this process' children have
    others.

    $DYN_DEATH_PIPE names the server of a watcher's process, else $DYN_PARENT_PID the parent; without either it is
    whoever is the parent now. `across_exec`: this process is about to become another program.
    """
    pipe, parent = os.environ.pop(DEATH_PIPE_ENV, None), os.environ.pop(PARENT_PID_ENV, None)
    if pipe is not None:
        die_with_holder(pipe, across_exec=across_exec)
    else:
        die_with_parent(int(parent) if parent else None)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, instead of the system's first process."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


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


def _prctl(name: str, option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise SupervisorError(f"prctl({name}) failed: {os.strerror(ctypes.get_errno())}")
