"""Facts about running servers, and what dead ones have left."""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from dynamo_local.core.doctor.servers import ServerFacts, Servers
from dynamo_local.core.errors import DynamoError
from dynamo_local.doctor.namespaces import namespaces
from state.files import sockets_of
from state.locks import server_pid
from state.machine.processes import Process, ProcFs, alive, descendants, pids, start_time
from state.paths import Sockets, StatePaths
from state.record import read_record
from state.remains import SHARED_MEMORY, has_segments, segment_prefix, segments_of
from state.statefile.model import State
from state.statefile.reconcile import leftovers
from state.statefile.store import StateStore

_ANSWER_WITHIN_S = 0.3
_HEALTHY = 200


def servers(root: Path) -> Servers:
    """Facts about all namespaces of the state folder."""
    found, running = namespaces(root), ProcFs().snapshot()
    facts = [_facts(paths, running) for paths in found]
    return Servers(
        tuple(each for each in facts if each.pid is not None or each.trouble or each.left or each.survivors),
        _foreign_segments(found),
        _foreign_sockets(found),
    )


def server_processes(root: Path) -> frozenset[int]:
    """The pids of all processes of running servers."""
    found: frozenset[int] = frozenset()
    for paths in namespaces(root):
        with suppress(DynamoError):
            if pid := server_pid(paths):
                found |= descendants(pid)
    return found


def _facts(paths: StatePaths, running: Collection[Process]) -> ServerFacts:
    try:
        pid = server_pid(paths)
    except DynamoError as error:
        return ServerFacts(paths.namespace, trouble=error.cause)
    if pid is None:
        survivors = tuple(process.pid for process in leftovers(paths, running))
        return ServerFacts(paths.namespace, left=_left(paths), survivors=survivors)
    try:
        state = StateStore(paths).read_file() if paths.statefile.exists() else None
    except DynamoError as error:
        return ServerFacts(paths.namespace, pid, trouble=error.cause)
    record = read_record(paths)
    if state is None or record is None or record.phase != "running":
        return ServerFacts(paths.namespace, pid, phase=record.phase if record is not None else "starting")
    if not Sockets.of_endpoint(state.circus_endpoint).circus.exists():
        return ServerFacts(paths.namespace, pid, trouble="circusd's sockets are missing")
    healthy = None if record.url is None else _is_healthy(record.url)
    return ServerFacts(paths.namespace, pid, phase=record.phase, url=record.url, healthy=healthy, dead=_dead(state))


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
