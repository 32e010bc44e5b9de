"""The servers of a state root, by their files and processes alone; no bus and no circusd is asked. `dynamo ls` lists
them, `dynamo stop` ends one, or removes what a crashed one has left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.names import MAIN, endpoint_of
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import DeviceKind
from state.endpoints.board import read_board
from state.endpoints.registry import forget, has_registry
from state.files import sockets_of, system_errors
from state.locks import ServerLock, server_pid
from state.machine.processes import ProcFs, alive, start_time
from state.namespaces import find_servers, is_running
from state.paths import StatePaths
from state.record import ServerRecord, read_record
from state.remains import has_segments
from state.statefile.leftovers import clear_leftovers, leftovers
from state.statefile.model import State
from state.statefile.store import StateStore
from state.statefile.transitions import taken

CRASHED = "crashed"
_BOOT_TIME = "btime "
_POLL_S = 0.05
_REPORT_EVERY_S = 5.0
_LOCKED_WITHIN_S = 3.0


class ServerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A server as `dynamo ls` shows it. What is not known is None.

    `state`: "starting", "running" (all services have been ready once), "stopping", or "crashed" (it was killed and has
    left files). `workers`: number of workers with a process, also of those that are only starting. `devices`: ids of
    devices that it holds. `since`: when its process started, ISO 8601 with the time zone. `note`: what is wrong.
    `control`: the socket at which the control API is answered; None as long as it is not.
    """

    namespace: str
    state: str
    pid: int | None = None
    url: str | None = None
    models: tuple[str, ...] = ()
    workers: int | None = None
    devices: tuple[int, ...] | None = None
    device_kind: DeviceKind | None = None
    since: str | None = None
    age_s: float | None = None
    note: str = ""
    control: str | None = None


@dataclass(frozen=True)
class Age:
    """When a process started."""

    since: str
    age_s: float


def list_servers(root: Path) -> list[ServerRow]:
    """List the servers of a state root, those that run first. Raises DiskError if the folder cannot be listed."""
    found = find_servers(root)
    return [_look(StatePaths(root, namespace)) for namespace in (*found.running, *found.crashed)]


def server_row(
    namespace: str,
    *,
    running: bool,
    pid: int | None,
    state: State | None,
    damage: str | None,
    record: ServerRecord | None,
    age: Age | None,
    board: Board | None = None,
) -> ServerRow:
    """Put together what is known of one server. Pure.

    `pid`: of the process that holds the lock. `state`: the statefile; None if there is none, or it cannot be read, for
    the reason in `damage`. `board`: None without endpoints.
    """
    if not running:
        remedy = f"`dynamo stop --namespace {namespace}` removes what it left"
        return ServerRow(namespace=namespace, state=CRASHED, note="; ".join(filter(None, (damage, remedy))))
    held = [] if state is None else [component for component in state.components.values() if component.holds]
    return ServerRow(
        namespace=namespace,
        state=_phase(state, damage, record),
        pid=state.owner.pid if state is not None else pid or None,
        url=record.url if record is not None else None,
        models=served_models(record, board),
        workers=None if state is None else sum(component.role in ENGINE_ROLES for component in held),
        devices=None if state is None else tuple(sorted(taken(state))),
        device_kind=None if state is None else state.device_kind,
        since=age.since if age is not None else None,
        age_s=age.age_s if age is not None else None,
        note=damage or "",
    )


def served_models(record: ServerRecord | None, board: Board | None) -> tuple[str, ...]:
    """The names that requests may give: those of the server's own model, of endpoints, and of their adapters. Pure."""
    names = list(record.models) if record is not None else []
    for each in board.revisions if board is not None else ():
        # The server's own model is in its record once it answers.
        if each.takes_requests and endpoint_of(each.revision) != MAIN:
            names += [*each.served_names, *(adapter.name for adapter in each.adapters)]
    return tuple(dict.fromkeys(names))


def _phase(state: State | None, damage: str | None, record: ServerRecord | None) -> str:
    if record is not None:
        return record.phase
    # A statefile without a record: the run directory was removed, and is made again. Neither: nothing was made yet.
    return "running" if state is not None or damage is not None else "starting"


def _look(paths: StatePaths) -> ServerRow:
    state, damage = _read(paths)
    pid = server_pid(paths) or (state.owner.pid if state is not None else None)
    control, running = sockets_of(paths).control, is_running(paths)
    row = server_row(
        paths.namespace,
        running=running,
        pid=pid,
        state=state,
        damage=damage,
        record=read_record(paths),
        age=_age(pid) if pid else None,
        board=read_board(paths),
    )
    return msgspec.structs.replace(row, control=str(control)) if running and control.exists() else row


def _read(paths: StatePaths) -> tuple[State | None, str | None]:
    try:
        return StateStore(paths).read_file(), None
    except NotRunningError:
        return None, None
    except StateError as error:
        return None, error.cause


def _age(pid: int) -> Age | None:
    ticks = start_time(pid)
    if ticks is None:
        return None
    started_s = ticks / os.sysconf("SC_CLK_TCK")
    since = datetime.fromtimestamp(_booted_at() + started_s).astimezone().isoformat(timespec="seconds")
    return Age(since, round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s), 1))


def _booted_at() -> int:
    """When the machine started, in seconds since the epoch."""
    with system_errors("cannot read /proc/stat"):
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(_BOOT_TIME)).removeprefix(_BOOT_TIME))


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
