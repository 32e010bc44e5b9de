"""What can be seen of a server by its files, processes and API, and what is wrong with it: as it tells itself, and as
`dynamo doctor` sees it if it does not answer."""

from __future__ import annotations

import asyncio
import http.client
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.control.operations import Call
from dynamo_local.core.errors import DynamoError
from state.endpoints.board import read_board
from state.locks import server_pid
from state.machine.processes import Process, start_time
from state.namespaces import is_running
from state.paths import Sockets, StatePaths
from state.record import read_record
from state.remains import has_segments
from state.statefile.leftovers import leftovers
from state.statefile.model import State
from state.statefile.store import StateStore

_ANSWER_WITHIN_S = 0.3
_HEALTHY = 200


@dataclass(frozen=True)
class Server:
    """What is known of the server of a namespace.

    `pid`: of the server; None if none runs. `trouble`: why its files cannot be read. `phase`: "starting", "running" or
    "stopping". `url`: of its API; None without one. `healthy`: whether the API says so; None if it does not answer.
    `dead`: watchers whose processes are gone. `left`: what a dead server has left, in words. `survivors`: pids of
    processes that it has left.
    """

    namespace: str
    pid: int | None = None
    trouble: str | None = None
    phase: str = "running"
    url: str | None = None
    healthy: bool | None = None
    dead: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    survivors: tuple[int, ...] = ()

    @property
    def is_clearable(self) -> bool:
        """Whether what is left can be removed without ending a process."""
        return self.pid is None and bool(self.left) and not self.survivors


async def tell_findings(paths: StatePaths, _: Call) -> dict[str, Any]:
    """Carry out DIAGNOSE, in the server of the namespace. The first finding is about the server."""

    def look() -> list[Finding]:
        return [server(look_at(paths, ())), *failed_endpoints(paths)]

    return {"findings": await asyncio.to_thread(look)}


def server(found: Server) -> Finding:
    return _trouble(found) or (_running(found) if found.pid is not None else _ended(found))


def look_at(paths: StatePaths, running: Collection[Process]) -> Server:
    """Return what can be seen of the server of a namespace. `running`: all processes of the machine, among which those
    that a dead server has left are looked for."""
    try:
        pid = server_pid(paths)
    except DynamoError as error:
        return Server(paths.namespace, trouble=error.cause)
    if pid is None:
        survivors = tuple(process.pid for process in leftovers(paths, running))
        return Server(paths.namespace, left=_left(paths), survivors=survivors)
    try:
        state = StateStore(paths).read_file() if paths.statefile.exists() else None
    except DynamoError as error:
        return Server(paths.namespace, pid, trouble=error.cause)
    record = read_record(paths)
    if state is None or record is None or record.phase != "running":
        return Server(paths.namespace, pid, phase=record.phase if record is not None else "starting")
    if not Sockets.of_endpoint(state.circus_endpoint).circus.exists():
        return Server(paths.namespace, pid, trouble="circusd's sockets are missing")
    healthy = None if record.url is None else _is_healthy(record.url)
    return Server(paths.namespace, pid, phase=record.phase, url=record.url, healthy=healthy, dead=_dead(state))


def _dead(state: State) -> tuple[str, ...]:
    return tuple(
        name
        for name, component in state.here.items()
        if component.holds and component.phase is None and component.pid and start_time(component.pid) is None
    )


def _is_healthy(url: str) -> bool | None:
    """Whether the API says that it is healthy; None if it does not answer. A root service without /health is healthy
    if it answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_WITHIN_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status in (_HEALTHY, 404)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _left(paths: StatePaths) -> tuple[str, ...]:
    """What a server that does not run has left, in words. Logs are kept on purpose."""
    known = {
        "a statefile": paths.statefile,
        "a lock": paths.server_lock,
        "a lock of the statefile": paths.update_lock,
        "a run folder": paths.run_dir,
    }
    found = [words for words, path in known.items() if os.path.lexists(path)]
    if has_segments(paths):
        found.append("shared memory")
    return tuple(found)


def failed_endpoints(paths: StatePaths) -> Iterator[Finding]:
    """The endpoints of a running server that have failed."""
    board = read_board(paths) if is_running(paths) else None
    for view in () if board is None else board.endpoints:
        if view.status.state == "failed":
            name = view.spec.name
            yield warn(
                f"endpoint {name}",
                f"has failed: {view.status.reason}",
                f"`dynamo endpoint update {name} --namespace {paths.namespace}` changes it",
            )


def _trouble(server: Server) -> Finding | None:
    if server.trouble is None:
        return None
    if server.pid is None:
        return fail(f"server {server.namespace}", server.trouble, "look at the permissions of the state folder")
    runs = f"runs (pid {server.pid}), but {server.trouble}"
    return fail(f"server {server.namespace}", runs, f"restart it: {_stop(server)}")


def _running(server: Server) -> Finding:
    check = f"server {server.namespace}"
    if server.phase != "running":
        return ok(check, f"{server.phase} (pid {server.pid})")
    if server.dead:
        return warn(check, f"no process at the moment: {', '.join(server.dead)}", _ps(server))
    if server.url is None:
        return ok(check, f"running (pid {server.pid})")
    if server.healthy:
        return ok(check, f"ready at {server.url}")
    what = "does not answer" if server.healthy is None else "is not ready"
    return warn(check, f"{server.url} {what}", _ps(server))


def _ended(server: Server) -> Finding:
    check = f"server {server.namespace}"
    if server.survivors:
        pids = ", ".join(map(str, server.survivors))
        return warn(check, f"crashed, and left processes: {pids}", f"{_stop(server)} ends them")
    return warn(check, f"crashed, and left {', '.join(server.left)}", "`dynamo doctor --fix` removes it")


def _ps(server: Server) -> str:
    return f"`dynamo ps --namespace {server.namespace}` shows why"


def _stop(server: Server) -> str:
    return f"`dynamo stop --namespace {server.namespace}`"
