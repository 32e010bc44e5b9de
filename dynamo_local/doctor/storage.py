"""The state folder, the cache folder, and the room on their disks."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.doctor.files import GIB, MIB, OTHERS, namespaces, shown_bytes, size_of
from state.files import nearest, room
from state.paths import Sockets, StatePaths

_STATE_NEEDS = 512 * MIB
"""For logs, which rotate, and the prefill queue."""
_CACHE_NEEDS = 2 * GIB
_OTHERS_WRITE = 0o022

_HEX_CHARS = 8
"""Length of the random part in the name of a folder of sockets (state/files.py)."""


@dataclass(frozen=True)
class Folder:
    """A folder of ours. `mode`: its permission bits; None if it does not exist yet. `is_writable`: of the nearest one
    that exists. `free`: bytes on its disk. `size`: bytes of its files; None if not known."""

    path: str
    mode: int | None
    is_mine: bool
    is_writable: bool
    free: int | None
    size: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is ours, and other users may look into it."""
        return self.mode is not None and self.is_mine and bool(self.mode & OTHERS)


def check_storage(root: Path, cache: Path) -> Iterator[Finding]:
    """`root`: the state folder. `cache`: our folder of models."""
    known = namespaces(root) or [StatePaths(root, "dynamo")]
    state, *inner = state_folders(root)
    yield state_folder(state, inner, all(Sockets(paths.run_dir).fit or _fits_elsewhere(paths) for paths in known))
    yield disk("disk", state, _STATE_NEEDS)
    yield cache_folder(_folder(cache, measured=True))


def state_folders(root: Path) -> list[Folder]:
    """The state folder, and the folders of servers in it."""
    inner = [path for paths in namespaces(root) for path in (paths.run_dir, paths.logs_dir) if path.is_dir()]
    return [_folder(path) for path in (root, *inner)]


def state_folder(folder: Folder, inner: Sequence[Folder], sockets_fit: bool) -> Finding:
    """`inner`: the folders of servers in it. `sockets_fit`: whether its path, or that of $TMPDIR, is short enough for
    sockets."""
    elsewhere = "set DYN_LOCAL_STATE_DIR to a folder of your own"
    if not folder.is_mine:
        return fail("state folder", f"{folder.path} belongs to another user", elsewhere)
    if not folder.is_writable:
        return fail("state folder", f"{folder.path} is not writable", elsewhere)
    if not sockets_fit:
        return fail(
            "state folder", f"{folder.path} is too long for a unix socket", "set DYN_LOCAL_STATE_DIR to a shorter path"
        )
    for each in (folder, *inner):
        if each.is_open:
            assert each.mode is not None
            remedy = f"`dynamo doctor --fix`, or: chmod 700 {each.path}"
            if each.mode & _OTHERS_WRITE:
                return fail("state folder", f"others can write to {each.path}", remedy)
            return warn("state folder", f"others can look into {each.path}", remedy)
    return ok("state folder", folder.path if folder.mode is not None else f"{folder.path} (made when it is needed)")


def disk(check: str, folder: Folder, needed: int) -> Finding:
    if folder.free is None:
        return warn(check, f"the room for {folder.path} is not known", "check the file system")
    found = f"{shown_bytes(folder.free)} free for {folder.path}"
    if folder.free < needed:
        return warn(check, f"{found}: {shown_bytes(needed)} should be", "free some room")
    return ok(check, found)


def cache_folder(folder: Folder) -> Finding:
    if not folder.is_writable:
        return warn(
            "cache folder",
            f"{folder.path} is not writable: models that are made or fetched cannot be kept",
            "set DYN_LOCAL_CACHE_DIR to a folder of your own",
        )
    found = disk("cache folder", folder, _CACHE_NEEDS)
    if found.level != "ok" or folder.size is None:
        return found
    return ok("cache folder", f"{found.found}, {shown_bytes(folder.size)} used")


def _folder(path: Path, *, measured: bool = False) -> Folder:
    """`measured`: with the size of its files."""
    base = nearest(path)
    found = base.stat()
    exists = base == path
    free = room(base)
    return Folder(
        str(path),
        stat.S_IMODE(found.st_mode) if exists else None,
        not exists or found.st_uid == os.geteuid(),
        base.is_dir() and os.access(base, os.W_OK | os.X_OK),
        free[0] if free else None,
        size_of(path) if measured and exists else None,
    )


def _fits_elsewhere(paths: StatePaths) -> bool:
    name = f"dynamo-{paths.namespace}-{'0' * _HEX_CHARS}"
    return Sockets(Path(tempfile.gettempdir()) / name).fit
