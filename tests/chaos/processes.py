"""Finds the processes of a server by their marks, signals them through pidfds, and measures them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.process.forkserver.protocol import SPARE_MODULE
from state.machine.processes import Process, ProcFs, alive, start_time
from state.paths import StatePaths
from state.statefile.leftovers import leftovers

_LAUNCHER = b"dynamo_local.process.forkserver.launcher"
_HELPERS = (
    _LAUNCHER,
    SPARE_MODULE.encode(),
    b"dynamo_local.supervisor.circus.adopted",
    b"multiprocessing.resource_tracker",
)
"""Command lines of helper processes of services, which faults do not target."""

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


class ServerProcesses:
    """The processes that a `dynamo serve` has started, by watcher."""

    def __init__(self, paths: StatePaths) -> None:
        self._paths = paths

    def by_watcher(self) -> dict[str, Process]:
        """Return the process of each watcher's service, without launchers, children and resource trackers."""
        found: dict[str, Process] = {}
        for process in leftovers(self._paths, ProcFs().snapshot()):
            if _is_helper(process.pid):
                continue
            watcher = process.environ[WATCHER_ENV]
            if watcher not in found or process.pid < found[watcher].pid:
                found[watcher] = process
        return found

    def launchers(self) -> dict[str, Process]:
        """Return the launchers of watchers whose services were forked."""
        processes = leftovers(self._paths, ProcFs().snapshot())
        return {each.environ[WATCHER_ENV]: each for each in processes if _LAUNCHER in command_of(each.pid)}


def command_of(pid: int) -> bytes:
    """Return the command line of a process, as in /proc; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_helper(pid: int) -> bool:
    command = command_of(pid)
    return any(helper in command for helper in _HELPERS)


def children(pid: int) -> list[Process]:
    """Return the direct children of a process."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        pids = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [process for child in pids if (process := identity_of(child)) is not None]


def identity_of(pid: int) -> Process | None:
    """Return a process with its start time, to be signalled safely; None if it has ended."""
    started = start_time(pid)
    return None if started is None else Process(pid, started, {})


def descendants(pid: int) -> list[Process]:
    """Return the children of a process, their children, and so on."""
    found = children(pid)
    return found + [process for child in found for process in descendants(child.pid)]


def send(process: Process, number: signal.Signals) -> bool:
    """Signal that process, and no later one with the same pid. Returns whether it was there."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(process.pid, process.start_time):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def resident_kb(pid: int) -> int | None:
    """Return the resident memory of a process in KiB; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KB
    except (OSError, IndexError):
        return None


def open_files(pid: int) -> int | None:
    """Return the number of open file descriptors of a process; None if it has ended."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
