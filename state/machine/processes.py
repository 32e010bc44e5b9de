"""Processes, by /proc: their identity, environment and family, and how to end them.

A pid is reused, so it identifies a process only together with the start time. Signals go through a pidfd, which never
reaches a later process of the same pid.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_local.core.errors import StateError
from state.files import system_errors
from state.statefile.model import Owner

_PROC = Path("/proc")
_DEAD = ("Z", "X")
# Positions after the command's closing parenthesis in /proc/PID/stat.
_STATE, _PARENT, _GROUP, _SESSION, _THREADS, _START, _EXIT = 0, 1, 2, 3, 17, 19, 49


@dataclass(frozen=True)
class Process:
    """A living process of this user. `start_time`: ticks since boot. `environ`: the environment at its start."""

    pid: int
    start_time: int
    environ: Mapping[str, str]


class Processes(Protocol):
    """The processes of the machine, for repair after a crash. `ProcFs` is the real implementation."""

    def snapshot(self) -> tuple[Process, ...]:
        """Living processes of this user whose environment can be read, except this process and its ancestors."""
        ...

    def end(self, processes: Collection[Process], term_s: float, kill_s: float) -> tuple[Process, ...]:
        """Send SIGTERM, and SIGKILL after `term_s`. Returns the processes that still live `kill_s` after that."""
        ...


def start_time(pid: int) -> int | None:
    """Ticks since boot when the process started; None if it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in _DEAD else int(fields[_START])


def alive(pid: int, started: int) -> bool:
    """Whether the process of that pid and start time lives."""
    return start_time(pid) == started


@dataclass(frozen=True)
class Kin:
    """Pids of a process's parent, and of the leaders of its group and session."""

    parent: int
    group: int
    session: int


def kin(pid: int) -> Kin | None:
    """The kin of a process; None if it is gone or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in _DEAD:
        return None
    return Kin(int(fields[_PARENT]), int(fields[_GROUP]), int(fields[_SESSION]))


def exit_code(pid: int, started: int) -> int | None:
    """The exit code of a process that has ended and was not reaped yet, negative for a signal; None for any other."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] not in _DEAD or int(fields[_START]) != started:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT]))


def this_process() -> Owner:
    """The identity of the calling process."""
    pid = os.getpid()
    started = start_time(pid)
    if started is None:
        raise StateError("/proc does not show this process", "mount /proc")
    return Owner(pid, started)


def pids() -> tuple[int, ...]:
    """The pids of all processes. Raises DiskError."""
    with system_errors("cannot list processes"):
        return tuple(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def pids_of_user(uid: int) -> tuple[int, ...]:
    """The pids of a user's processes. Raises DiskError."""
    found: list[int] = []
    for pid in pids():
        with suppress(OSError):
            if (_PROC / str(pid)).stat().st_uid == uid:
                found.append(pid)
    return tuple(found)


def task_count(pid: int) -> int:
    """The number of a process's threads; 0 if the process is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[_THREADS])


def command_name(pid: int) -> str:
    """The name of a process's command, cut to 15 characters by the kernel; empty if the process is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def descendants(pid: int) -> frozenset[int]:
    """The process and all that it has started, directly or not."""
    parents = {other: int(fields[_PARENT]) for other in pids() if (fields := _stat(other)) is not None}
    found = {pid}
    while more := {other for other, parent in parents.items() if parent in found} - found:
        found |= more
    return frozenset(found)


@dataclass(frozen=True)
class ProcFs:
    """Processes of this machine. `send` delivers a signal to a pidfd."""

    send: Callable[[int, int], None] = signal.pidfd_send_signal

    def snapshot(self) -> tuple[Process, ...]:
        spared = set(_lineage(os.getpid()))
        found = (_read(pid) for pid in pids() if pid not in spared)
        return tuple(process for process in found if process is not None)

    def end(self, processes: Collection[Process], term_s: float, kill_s: float) -> tuple[Process, ...]:
        with system_errors("cannot end processes"), ExitStack() as stack:
            waiting = {fd: process for process in processes if (fd := _open(process, stack)) is not None}
            for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
                for descriptor in waiting:
                    with suppress(ProcessLookupError):
                        self.send(descriptor, number)
                for descriptor in _ended(waiting, wait_s):
                    del waiting[descriptor]
            return tuple(waiting.values())


def _open(process: Process, stack: ExitStack) -> int | None:
    """A pidfd of the process, closed with the stack; None if the process is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    # Checked after opening: from here on the pidfd cannot come to mean another process.
    return descriptor if alive(process.pid, process.start_time) else None


def _ended(descriptors: Collection[int], wait_s: float) -> set[int]:
    """Wait for processes to end, by their pidfds. Returns the pidfds of those that did, early when all did."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ended: set[int] = set()
    deadline = time.monotonic() + wait_s
    while len(ended) < len(descriptors):
        left_s = deadline - time.monotonic()
        for descriptor, _ in poller.poll(max(left_s, 0) * 1000):
            poller.unregister(descriptor)
            ended.add(descriptor)
        if left_s <= 0:
            break
    return ended


def _read(pid: int) -> Process | None:
    try:
        if (_PROC / str(pid)).stat().st_uid != os.geteuid():
            return None
        before = start_time(pid)
        environ = _environment((_PROC / str(pid) / "environ").read_bytes())
    except OSError:
        return None  # the process ended meanwhile, or belongs to another user
    if before is None or start_time(pid) != before:
        return None
    return Process(pid, before, environ)


def environment_of(pid: int) -> dict[str, str]:
    """The environment of a process at its start; empty if the process is gone or may not be read."""
    try:
        return _environment((_PROC / str(pid) / "environ").read_bytes())
    except OSError:
        return {}


def _environment(data: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _lineage(pid: int) -> Iterator[int]:
    """The process and its ancestors."""
    while pid > 0:
        yield pid
        fields = _stat(pid)
        pid = 0 if fields is None else int(fields[_PARENT])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command, which may contain spaces and parentheses itself."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
