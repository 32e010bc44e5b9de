"""Running servers, and what crashed ones have left."""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dynamo_local.core.errors import DynamoError
from dynamo_local.doctor.finding import Finding, fail, ok, warn
from dynamo_local.doctor.namespaces import namespaces
from state.files import sockets_of
from state.locks import server_pid
from state.machine.processes import Process, ProcFs, alive, descendants, pids, start_time
from state.paths import Sockets, StatePaths
from state.record import read_record
from state.remains import SHARED_MEMORY, has_segments, segment_prefix, segments_of
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


def check_servers(root: Path) -> Iterator[Finding]:
    """`root`: the state folder."""
    found = servers(root)
    yield from map(server, found)
    if not found:
        yield ok("servers", "none runs, and none has left anything")
    yield from foreign_segments(_foreign_segments(namespaces(root)))
    yield from foreign_sockets(_foreign_sockets(namespaces(root)))


def server(found: Server) -> Finding:
    return _trouble(found) or (_running(found) if found.pid is not None else _ended(found))


def foreign_segments(names: Sequence[str]) -> Iterator[Finding]:
    """`names`: of shared memory of this user under our names that no process uses and no namespace here has."""
    if names:
        paths = " ".join(f"/dev/shm/{name}" for name in names)
        yield warn(
            "leftovers",
            f"{len(names)} files of shared memory of servers that are not in this state folder",
            f"if no container uses them: rm {paths}",
        )


def foreign_sockets(folders: Sequence[str]) -> Iterator[Finding]:
    """`folders`: of sockets in $TMPDIR, as `foreign_segments`."""
    if folders:
        yield warn(
            "leftovers",
            f"{len(folders)} folders of sockets on which no process listens",
            f"if no server is starting: rm -r {' '.join(folders)}",
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


def servers(root: Path) -> list[Server]:
    """Return the servers of the state folder that run, or have left something."""
    running = ProcFs().snapshot()
    found = [_server(paths, running) for paths in namespaces(root)]
    return [each for each in found if each.pid is not None or each.trouble or each.left or each.survivors]


def server_processes(root: Path) -> frozenset[int]:
    """The pids of all processes of running servers."""
    found: frozenset[int] = frozenset()
    for paths in namespaces(root):
        with suppress(DynamoError):
            if pid := server_pid(paths):
                found |= descendants(pid)
    return found


def _server(paths: StatePaths, running: Collection[Process]) -> Server:
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


def _foreign_segments(found: list[StatePaths]) -> tuple[str, ...]:
    prefixes = tuple(segment_prefix(paths) for paths in found)
    names = [path.name for path in SHARED_MEMORY.glob("dynamo-*") if _is_mine(path)]
    unknown = {name for name in names if not name.startswith(prefixes)}
    if not unknown:
        return ()
    used = {segment.name for pid in pids() for segment in segments_of(pid)}
    return tuple(sorted(unknown - used))


def _foreign_sockets(found: list[StatePaths]) -> tuple[str, ...]:
    linked: set[Path] = set()
    for paths in found:
        with suppress(DynamoError):
            linked.add(sockets_of(paths).directory)
    folders = Path(tempfile.gettempdir()).glob("dynamo-*-*")
    return tuple(sorted(str(folder) for folder in folders if folder not in linked and _is_stale(folder)))


def _is_stale(folder: Path) -> bool:
    """Whether it is a folder of sockets of a circusd that does not listen any more."""
    command_socket = Sockets(folder).circus
    # Whose it is comes first: the folders of other users cannot be looked into.
    if not _is_mine(folder) or not command_socket.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER_WITHIN_S)
        try:
            probe.connect(str(command_socket))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def owner_lives(paths: StatePaths) -> bool:
    """Whether the process that the statefile names as the server lives. False if there is no readable statefile."""
    try:
        owner = StateStore(paths).read_file().owner
    except DynamoError:
        return False
    return alive(owner.pid, owner.start_time)
