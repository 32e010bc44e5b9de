"""Threads and cores, by /proc: how long threads have run and waited for a core, and which cores they may use."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.process.soft_binding import Shares, ThreadTimes, others_of, shares_between

_PROC = Path("/proc")
_NS = 1e-9
_STATE, _CORE = 0, 36  # positions after the command's closing parenthesis in /proc/PID/task/TID/stat
_BUSY = slice(0, 3)  # user (guests included), nice, system; then idle, iowait
_INTERRUPTS = slice(5, 7)


def times_of(pid: int, thread: int) -> ThreadTimes | None:
    """The counters of a thread; None if it is gone, or another user's."""
    try:
        ran, waited, _ = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
        fields = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(b")")[2].split()
    except (OSError, ValueError):
        # A kernel without these statistics has no such file, or an empty one.
        return None
    return ThreadTimes(int(ran) * _NS, int(waited) * _NS, fields[_STATE] == b"R", int(fields[_CORE]))


def _read(path: str) -> bytes:
    """Read a small file with the fewest system calls: there are many of them, read often."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def threads_of(pid: int) -> tuple[int, ...]:
    """The ids of a process's threads; none if it is gone."""
    try:
        return tuple(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208  # cheaper
    except OSError:
        return ()


def times_of_all(pids: Iterable[int]) -> dict[int, ThreadTimes]:
    """The counters of all threads of the processes, by thread id."""
    found = ((thread, times_of(pid, thread)) for pid in pids for thread in threads_of(pid))
    return {thread: times for thread, times in found if times is not None}


def forked_by(pid: int, thread: int) -> tuple[int, ...]:
    """The children that one thread of a process has forked; none on a kernel without that file."""
    try:
        return tuple(int(child) for child in (_PROC / str(pid) / "task" / str(thread) / "children").read_text().split())
    except OSError:
        return ()


def family_of(pid: int) -> tuple[int, ...]:
    """The process and all its descendants."""
    found = [pid]
    for each in found:
        found += [child for thread in threads_of(each) for child in forked_by(each, thread)]
    return tuple(found)


def busy_seconds() -> dict[int, float]:
    """The time for which each core has been busy since boot."""
    ticks = os.sysconf("SC_CLK_TCK")
    lines = (line.split() for line in (_PROC / "stat").read_text().splitlines())
    cores = {name.removeprefix("cpu"): [int(field) for field in fields] for name, *fields in lines if "cpu" in name}
    return {
        int(core): (sum(fields[_BUSY]) + sum(fields[_INTERRUPTS])) / ticks for core, fields in cores.items() if core
    }


def cores_of(thread: int) -> frozenset[int]:
    """The cores on which a thread may run; none if it is gone."""
    with suppress(OSError):
        return frozenset(os.sched_getaffinity(thread))
    return frozenset()


def bind_thread(thread: int, cores: Collection[int]) -> None:
    """Bind a thread to the cores. Does nothing if the thread or the cores are gone."""
    with suppress(OSError):
        os.sched_setaffinity(thread, cores)


@dataclass(frozen=True)
class _Look:
    at: float
    own: Mapping[int, ThreadTimes]
    beside: Mapping[int, ThreadTimes]
    busy_s: Mapping[int, float]


@dataclass
class CoreWatch:
    """Measures how our processes and others have shared the cores since the previous look."""

    cores: frozenset[int]
    _last: _Look | None = field(default=None, init=False)

    def look(
        self, own: Mapping[int, ThreadTimes], beside: Mapping[int, ThreadTimes] | None = None
    ) -> tuple[Shares, dict[int, float]] | None:
        """Measure since the previous look; None at the first one.

        Returns the sums over the `own` threads, and for each core the share of the time in which it was busy with
        neither these nor the threads `beside`.
        """
        now = _Look(time.monotonic(), own, beside or {}, busy_seconds())
        last, self._last = self._last, now
        if last is None:
            return None
        seconds = now.at - last.at
        shares = shares_between(last.own, now.own, seconds)
        also = shares_between(last.beside, now.beside, seconds).ran_s
        busy = {core: now.busy_s[core] - last.busy_s.get(core, 0.0) for core in now.busy_s.keys() & self.cores}
        ran = {core: shares.ran_s.get(core, 0.0) + also.get(core, 0.0) for core in busy}
        return shares, others_of(busy, ran, seconds)
