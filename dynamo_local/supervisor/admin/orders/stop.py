"""`dynamo stop`: ends the server of a namespace and waits until it is gone, or removes what a crashed one has left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError
from dynamo_local.supervisor.server.reports.report import Report
from state.endpoints.registry import forget, has_registry
from state.locks import ServerLock, server_pid
from state.machine.processes import ProcFs, alive, start_time
from state.namespaces import find_servers
from state.paths import StatePaths
from state.remains import has_segments
from state.statefile.leftovers import clear_leftovers, leftovers
from state.statefile.store import StateStore

_POLL_S = 0.05
_REPORT_EVERY_S = 5.0
_LOCKED_WITHIN_S = 3.0


def stop(paths: StatePaths, timeout_s: float, report: Report, *, forget_endpoints: bool = False) -> None:
    """End the server, or remove what a crashed one has left; and drop the endpoints if told to.

    Raises NotRunningError when there is neither, SupervisorError when the server still runs after `timeout_s`.
    """
    pid = server_pid(paths)
    if pid is None and _processes_left(paths):
        pid = _await_lock(paths)
    if pid is None:
        _clear(paths, report, forget_endpoints=forget_endpoints)
        return
    if pid == 0 or not _is_owner(paths, pid):
        raise SupervisorError(f"the server in namespace {paths.namespace} is only starting", "try again in a moment")
    report.step(f"stopping the server in namespace {paths.namespace} (pid {pid})")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _await_end(paths, pid, timeout_s, report)
    report.step("stopped")
    if forget_endpoints:
        with ServerLock(paths) as lock:
            _forget(lock, report)


def _processes_left(paths: StatePaths) -> bool:
    return bool(leftovers(paths, ProcFs().snapshot()))


def _await_lock(paths: StatePaths) -> int | None:
    """Wait for the lock of a server whose lock file was removed, which it makes again within a second. Returns its pid;
    None if there is no such server."""
    give_up_at = time.monotonic() + _LOCKED_WITHIN_S
    while (pid := server_pid(paths)) is None and time.monotonic() < give_up_at and _processes_left(paths):
        time.sleep(_POLL_S)
    return pid


def _is_owner(paths: StatePaths, pid: int) -> bool:
    """Whether the statefile confirms that this process is the server, and not a later one of the same pid."""
    try:
        owner = StateStore(paths).read().owner
    except (NotRunningError, StateError):
        return False
    return owner.pid == pid and alive(owner.pid, owner.start_time)


def _await_end(paths: StatePaths, pid: int, timeout_s: float, report: Report) -> None:
    started = time.monotonic()
    reported = started
    while server_pid(paths) == pid:
        now = time.monotonic()
        if now - started >= timeout_s:
            raise SupervisorError(
                f"the server (pid {pid}) still runs after {timeout_s:g} s",
                "run `dynamo stop` again to force it",
            )
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            report.step(f"waiting for {', '.join(_remaining(paths)) or 'the server'}")
        time.sleep(_POLL_S)


def _remaining(paths: StatePaths) -> list[str]:
    try:
        here = StateStore(paths).read().here.items()
    except (NotRunningError, StateError):
        return []
    return [name for name, component in here if component.pid is not None and start_time(component.pid) is not None]


def _forget(lock: ServerLock, report: Report) -> bool:
    """Drop the endpoints. Returns whether there were any files of them."""
    found = forget(lock)
    report.step("dropped the endpoints" if found else "there were no endpoints to drop")
    return found


def _clear(paths: StatePaths, report: Report, *, forget_endpoints: bool) -> None:
    notes: tuple[str, ...] = ()
    if forget_endpoints and has_registry(paths):
        with ServerLock(paths) as lock:
            for note in clear_leftovers(lock):
                report.step(note)
            _forget(lock, report)
        return
    if paths.root.exists() or _processes_left(paths) or has_segments(paths):
        with ServerLock(paths) as lock:
            notes = clear_leftovers(lock)
    if not notes:
        running = find_servers(paths.root).running
        raise NotRunningError(
            f"no server runs in namespace {paths.namespace}",
            f"servers run in: {', '.join(running)}" if running else None,
        )
    for note in notes:
        report.step(note)
