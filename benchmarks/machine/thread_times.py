"""CPU time and context switches of single threads. Reads /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@dataclass(frozen=True)
class Thread:
    """A thread of a process."""

    pid: int
    tid: int


@dataclass(frozen=True)
class ThreadTimes:
    """Up to a moment. `at`: that moment (time.monotonic)."""

    name: str
    cpu_ns: int
    switches: int
    at: float


def parse_times(status: str, schedstat: str, at: float) -> ThreadTimes:
    """Of the texts of `status` and `schedstat` of a thread."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return ThreadTimes(
        fields["Name"].strip(), int(schedstat.split()[0]), sum(int(fields[name]) for name in _SWITCHES), at
    )


def read_threads(pids: Iterable[int]) -> dict[Thread, ThreadTimes]:
    """All threads of the processes. Those that end meanwhile are left out."""
    found: dict[Thread, ThreadTimes] = {}
    for pid in pids:
        try:
            tids = [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
        except OSError:
            continue
        for tid in tids:
            place = _PROC / str(pid) / "task" / str(tid)
            try:
                status, schedstat = (place / "status").read_text(), (place / "schedstat").read_text()
            except OSError:
                continue
            found[Thread(pid, tid)] = parse_times(status, schedstat, time.monotonic())
    return found
