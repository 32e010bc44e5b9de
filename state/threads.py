"""Threads and cores as /proc shows them: who has run, who waits for a core, who may run where."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.run_queue import ThreadTimes

_PROC = Path("/proc")
_NS = 1e-9
_STATE, _CORE = 0, 36  # positions after the command's closing parenthesis in /proc/PID/task/TID/stat
_BUSY = slice(0, 3)  # user (guests included), nice, system; then idle, iowait
_INTERRUPTS = slice(5, 7)


def times_of(pid: int, thread: int) -> ThreadTimes | None:
    """None: it is gone, or not ours to look at."""
    folder = _PROC / str(pid) / "task" / str(thread)
    try:
        ran, waited, _ = (folder / "schedstat").read_text().split()
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        # A kernel without these statistics has no such file, or an empty one.
        return None
    return ThreadTimes(int(ran) * _NS, int(waited) * _NS, fields[_STATE] == "R", int(fields[_CORE]))


def threads_of(pid: int) -> tuple[int, ...]:
    """By id; no ones if the process is gone."""
    try:
        return tuple(int(folder.name) for folder in (_PROC / str(pid) / "task").iterdir())
    except OSError:
        return ()


def times_of_all(pids: Iterable[int]) -> dict[int, ThreadTimes]:
    """All threads of the processes, by id."""
    found = ((thread, times_of(pid, thread)) for pid in pids for thread in threads_of(pid))
    return {thread: times for thread, times in found if times is not None}


def forked_by(pid: int, thread: int) -> tuple[int, ...]:
    """The children of a process that this thread has forked; no ones on a kernel that does not tell."""
    try:
        return tuple(int(child) for child in (_PROC / str(pid) / "task" / str(thread) / "children").read_text().split())
    except OSError:
        return ()


def busy_seconds() -> dict[int, float]:
    """By core, since boot: how long it has done something."""
    ticks = os.sysconf("SC_CLK_TCK")
    lines = (line.split() for line in (_PROC / "stat").read_text().splitlines())
    cores = {name.removeprefix("cpu"): [int(field) for field in fields] for name, *fields in lines if "cpu" in name}
    return {
        int(core): (sum(fields[_BUSY]) + sum(fields[_INTERRUPTS])) / ticks for core, fields in cores.items() if core
    }


def cores_of(thread: int) -> frozenset[int]:
    """Where the thread may run; empty if it is gone."""
    with suppress(OSError):
        return frozenset(os.sched_getaffinity(thread))
    return frozenset()


def bind_thread(thread: int, cores: Collection[int]) -> None:
    """Have it run on these cores, unless it is gone or they are."""
    with suppress(OSError):
        os.sched_setaffinity(thread, cores)
