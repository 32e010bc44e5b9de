"""`dynamo ls`: the servers of a state root, by their files alone. No bus and no circusd is asked."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.endpoints import Board
from state.devices.allocation import DeviceKind
from state.endpoints.board import read_board
from state.files import sockets_of, system_errors
from state.locks import server_pid
from state.machine.processes import start_time
from state.namespaces import find_servers, is_running
from state.paths import StatePaths
from state.record import ServerRecord, read_record
from state.statefile.model import State
from state.statefile.store import StateStore
from state.statefile.transitions import taken

CRASHED = "crashed"
_BOOT_TIME = "btime "


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
        if each.takes_requests:
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
