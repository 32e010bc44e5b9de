"""Removes what killed processes have left: the server does while it runs, and the next server after a crash.

    {directory of the sockets}/{pid}/                  its sockets and temporary files, mode 0700
    {directory of the sockets}/{pid}/owner.json        the identity of the process, and its lease
    /dev/shm/dynamo-{server}-{lease}-*                 shared memory that it, or its children, have created
    {directory of the sockets}/{pid}/segments.json     their other shared memory, whose names are not ours

Shared memory that a living process has mapped or open is never removed.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from state.files import (
    DIRECTORY_MODE,
    remove_run_directory,
    remove_tree,
    replace_file,
    sockets_of,
    system_errors,
)
from state.machine.processes import alive, pids
from state.paths import Sockets, StatePaths
from state.statefile.model import Owner

SEGMENTS_ENV = "DYN_SHM_PREFIX"
"""Set by the server in each of its processes: prefix of the names of shared memory that the process creates."""

SHARED_MEMORY = Path("/dev/shm")
GONE_WITHIN_S = 5.0
"""For killed processes to be gone. Freeing much memory takes seconds."""

_IN_SHARED_MEMORY = f"{SHARED_MEMORY}/".encode()
_POLL_S = 0.05
_PROC = Path("/proc")
_OWNER = "owner.json"
_SEGMENTS = "segments.json"
_MAPPED = re.compile(rf"\s([0-9]+)\s+{SHARED_MEMORY}/([^/\n]+)$".encode(), re.MULTILINE)
"""Matches inode and name of shared memory, at the end of a line of /proc/PID/maps."""


class Segment(msgspec.Struct, frozen=True, order=True):
    """A file of shared memory. The inode tells it from a later file of the same name."""

    name: str
    inode: int


class _Owner(msgspec.Struct, frozen=True):
    pid: int
    start_time: int
    lease: str


def segment_prefix(paths: StatePaths, lease: str = "") -> str:
    """The prefix of the names of a server's shared memory, or of those of its process with that lease."""
    # The pid namespace is part of it: a container may have the same paths and the same /dev/shm, but other processes.
    processes = (_PROC / "self/ns/pid").readlink()
    server = hashlib.sha256(f"{paths.root}\0{paths.namespace}\0{processes}".encode()).hexdigest()[:12]
    return f"dynamo-{server}-{lease}-" if lease else f"dynamo-{server}-"


def make_folder(sockets: Sockets, owner: Owner, lease: str) -> Path:
    """Make the folder of a process, and remove what an earlier process of its pid has left. Raises StateError."""
    folder = sockets.process_folder(owner.pid)
    with system_errors(f"cannot create {folder}"):
        if folder.exists():
            _remove_segments(_left_in(folder))
            remove_tree(folder)
        folder.mkdir(mode=DIRECTORY_MODE)
    data = msgspec.json.encode(_Owner(owner.pid, owner.start_time, lease))
    replace_file(folder / _OWNER, data, durable=False)
    return folder


def record_segments(folder: Path, processes: Iterable[int]) -> None:
    """Record in a process's folder which shared memory these processes have. Raises StateError."""
    found = sorted({segment for pid in processes for segment in segments_of(pid)})
    replace_file(folder / _SEGMENTS, msgspec.json.encode(found), durable=False)


def reap(sockets: Sockets) -> None:
    """Remove what dead processes have left. If a child of one still uses shared memory, that process's folder is left
    for the next call. Raises StateError."""
    with system_errors(f"cannot clear {sockets.directory}"):
        for folder in _folders(sockets):
            if _is_gone(folder) and _remove_segments(_left_in(folder)):
                remove_tree(folder)


def clear_segments(paths: StatePaths, sockets: Sockets, wait_s: float = GONE_WITHIN_S) -> int:
    """Remove the shared memory of a server that has ended. Waits up to `wait_s` for killed processes that still use
    some. Returns the number of removed files. Raises StateError."""
    with system_errors(f"cannot clear {SHARED_MEMORY}"):
        found = {segment for folder in _folders(sockets) for segment in _left_in(folder)}
        found = {segment for segment in found | _named(f"{segment_prefix(paths)}*") if _is_there(segment)}
        give_up_at = time.monotonic() + wait_s
        while not _remove_segments(found) and time.monotonic() < give_up_at and has_segments(paths):
            time.sleep(_POLL_S)
        return len([segment for segment in found if not _is_there(segment)])


def has_segments(paths: StatePaths) -> bool:
    """Whether there is shared memory of the namespace's server, also of one that has ended."""
    return bool(_named(f"{segment_prefix(paths)}*"))


def remove_remains(paths: StatePaths) -> tuple[int, bool]:
    """Remove shared memory and run directory of a server none of whose processes lives. Returns the number of files of
    shared memory, and whether there was a run directory. Raises StateError."""
    segments = clear_segments(paths, sockets_of(paths))
    return segments, remove_run_directory(paths)


def segments_of(pid: int) -> set[Segment]:
    """The shared memory that a process has mapped or open; none if the process is gone, or another user's."""
    found: set[Segment] = set()
    with suppress(OSError):
        found.update(_mapped_in((_PROC / str(pid) / "maps").read_bytes()))
    with suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if (target := descriptor.readlink()).parent == SHARED_MEMORY:
                    found.add(Segment(target.name, descriptor.stat().st_ino))
    return found


def _mapped_in(maps: bytes) -> Iterator[Segment]:
    """The shared memory in what /proc/PID/maps says, which for an engine's process has thousands of lines: the
    expression is tried on the few that matter."""
    at = 0
    while (at := maps.find(_IN_SHARED_MEMORY, at)) >= 0:
        start, end = maps.rfind(b"\n", 0, at) + 1, maps.find(b"\n", at) + 1 or len(maps)
        for inode, name in _MAPPED.findall(maps[start:end]):
            yield Segment(name.decode(errors="replace"), int(inode))
        at = end


def _folders(sockets: Sockets) -> Iterator[Path]:
    if sockets.directory.is_symlink():
        return
    with suppress(FileNotFoundError):
        yield from (path for path in sockets.directory.iterdir() if path.name.isdigit() and not path.is_symlink())


def _is_gone(folder: Path) -> bool:
    owner = _owner_of(folder)
    if owner is None:
        # A living process may be about to write owner.json.
        return not (_PROC / folder.name).exists()
    return not alive(owner.pid, owner.start_time)


def _left_in(folder: Path) -> set[Segment]:
    owner = _owner_of(folder)
    recorded: set[Segment] = set()
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        recorded.update(msgspec.json.decode((folder / _SEGMENTS).read_bytes(), type=list[Segment]))
    return recorded if owner is None else recorded | _named(f"dynamo-*-{owner.lease}-*")


def _owner_of(folder: Path) -> _Owner | None:
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _OWNER).read_bytes(), type=_Owner)
    return None


def _named(pattern: str) -> set[Segment]:
    inodes = {path.name: _inode_of(path) for path in SHARED_MEMORY.glob(pattern)}
    return {Segment(name, inode) for name, inode in inodes.items() if inode is not None}


def _is_there(segment: Segment) -> bool:
    return _inode_of(SHARED_MEMORY / segment.name) == segment.inode


def _inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def _remove_segments(segments: Collection[Segment]) -> bool:
    """Remove the segments that exist and that no process uses. Returns whether none is left."""
    left = {segment for segment in segments if _is_there(segment)}
    if not left:
        return True
    used = left & {segment for pid in pids() for segment in segments_of(pid)}
    for segment in left - used:
        # A recorded segment may belong to another user.
        with suppress(FileNotFoundError, PermissionError):
            (SHARED_MEMORY / segment.name).unlink()
    return not used
