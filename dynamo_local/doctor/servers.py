"""Running servers, what crashed ones have left, the registries of endpoints, and repairs that do no harm."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import DIAGNOSE
from dynamo_local.core.errors import DynamoError, NamespaceBusyError, StateError
from dynamo_local.doctor.files import OTHERS, namespaces
from dynamo_local.doctor.storage import state_folders
from dynamo_local.supervisor.diagnosis import Server, failed_endpoints, look_at, server
from state.documents import decode
from state.endpoints.registry import REGISTRY, has_registry, read_registry
from state.files import DIRECTORY_MODE, FILE_MODE, sockets_of, system_errors
from state.locks import ServerLock, server_pid
from state.machine.processes import ProcFs, alive, descendants, pids
from state.paths import Sockets, StatePaths
from state.remains import SHARED_MEMORY, segment_prefix, segments_of
from state.statefile.leftovers import clear_leftovers, leftovers
from state.statefile.store import StateStore

_TOLD_WITHIN_S = 1.0
"""A server that needs longer may hang."""
_ANSWER_WITHIN_S = 0.3


def told_by_servers(root: Path) -> dict[str, list[Finding]]:
    """Return the findings of running servers about themselves, by namespace, the one about the server itself first.
    Servers that do not answer are left out: they are to be looked at from here."""
    told: dict[str, list[Finding]] = {}
    for paths in namespaces(root):
        with suppress(DynamoError):
            if server_pid(paths) is not None:
                answer = ControlClient(paths).do(DIAGNOSE, timeout_s=_TOLD_WITHIN_S)
                told[paths.namespace] = msgspec.convert(answer["findings"], list[Finding])
    return told


def check_servers(root: Path, told: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """`root`: the state folder. `told`: see `told_by_servers`."""
    found = {namespace: findings[0] for namespace, findings in told.items()}
    found |= {each.namespace: server(each) for each in servers(root, without=told)}
    yield from (found[namespace] for namespace in sorted(found))
    if not found:
        yield ok("servers", "none runs, and none has left anything")
    yield from foreign_segments(_foreign_segments(namespaces(root)))
    yield from foreign_sockets(_foreign_sockets(namespaces(root)))


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


def servers(root: Path, without: Container[str] = ()) -> list[Server]:
    """Return the servers of the state folder that run, or have left something, but for those of some namespaces."""
    running = ProcFs().snapshot()
    found = [look_at(paths, running) for paths in namespaces(root) if paths.namespace not in without]
    return [each for each in found if each.pid is not None or each.trouble or each.left or each.survivors]


def server_processes(root: Path) -> frozenset[int]:
    """The pids of all processes of running servers."""
    found: frozenset[int] = frozenset()
    for paths in namespaces(root):
        with suppress(DynamoError):
            if pid := server_pid(paths):
                found |= descendants(pid)
    return found


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


def check_endpoints(root: Path, told: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Findings for each namespace of the state folder that has a registry. `told`: see `told_by_servers`."""
    for paths in namespaces(root):
        if has_registry(paths):
            yield from _registry(paths, told)


def open_files(paths: StatePaths) -> list[Path]:
    """Files of a registry, of ours, that other users can read or write."""
    return [path for path in (paths.registry_file, paths.registry_copy) if path.exists() and _is_open(path)]


def _registry(paths: StatePaths, told: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    check, opened = f"endpoints {paths.namespace}", list(_opened(paths))
    try:
        number, damage = len(read_registry(paths).entries), _damage(paths)
    except StateError as error:
        yield fail(check, error.cause, error.remedy or "look at the permissions of the state folder")
        yield from opened
        return
    if damage is not None:
        yield warn(check, damage, "nothing: the next change of an endpoint, or start of the server, writes both")
    elif not opened:
        yield ok(check, f"{number} in the registry")
    yield from opened
    yield from told[paths.namespace][1:] if paths.namespace in told else failed_endpoints(paths)


def _opened(paths: StatePaths) -> Iterator[Finding]:
    if found := open_files(paths):
        names = " ".join(map(str, found))
        remedy = f"`dynamo doctor --fix`, or: chmod 600 {names}"
        yield warn(f"endpoints {paths.namespace}", f"other users can open {names}", remedy)


def _damage(paths: StatePaths) -> str | None:
    """Which of the two files of a registry is damaged or missing, with the reason."""
    for path in (paths.registry_file, paths.registry_copy):
        try:
            decode(REGISTRY, path.read_bytes())
        except OSError as error:
            return f"{path} cannot be read ({error.strerror}); the other one of its two files is whole"
        except StateError as error:
            return f"{path} is damaged ({error.cause}); the other one of its two files is whole"
    return None


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and bool(stat.S_IMODE(found.st_mode) & OTHERS)


def repair(root: Path) -> list[str]:
    """Close our folders and registries to other users, and remove what dead servers have left. Returns a line for each
    thing done. Raises StateError."""
    done = [*close_folders(root), *close_registries(root)]
    for each in servers(root):
        if each.is_clearable:
            done += _clear(StatePaths(root, each.namespace))
    return done


def close_folders(root: Path) -> list[str]:
    """Give our folders that others can open the mode 0700. The cache is left alone: its files are no secret."""
    done: list[str] = []
    for folder in state_folders(root):
        if folder.is_open:
            with system_errors(f"cannot close {folder.path} to others"):
                Path(folder.path).chmod(DIRECTORY_MODE)
            done.append(f"closed {folder.path} to other users")
    return done


def close_registries(root: Path) -> list[str]:
    """Give files of registries that others can open the mode 0600."""
    found = [path for paths in namespaces(root) for path in open_files(paths)]
    for path in found:
        with system_errors(f"cannot close {path} to others"):
            path.chmod(FILE_MODE)
    return [f"closed {path} to other users" for path in found]


def _clear(paths: StatePaths) -> list[str]:
    # A server may have been started since the look: the lock tells, and keeps others from starting meanwhile.
    with suppress(NamespaceBusyError), ServerLock(paths) as lock:
        if not owner_lives(paths) and not leftovers(paths, ProcFs().snapshot()):
            notes = list(clear_leftovers(lock))
            return notes or [f"removed the lock of a crashed server: {paths.server_lock}"]
    return []
