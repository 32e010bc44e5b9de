"""The state folder, the cache folder, and the room on their disks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import GIB, MIB, Finding, fail, ok, shown_bytes, warn

_STATE_NEEDS = 512 * MIB
"""For logs, which rotate, and the prefill queue."""
_CACHE_NEEDS = 2 * GIB
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


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


@dataclass(frozen=True)
class Storage:
    """`state`: the folder of statefiles. `inner`: the folders of servers in it. `sockets_fit`: whether the path of the
    state folder, or of $TMPDIR, is short enough for sockets."""

    state: Folder
    inner: tuple[Folder, ...]
    cache: Folder
    sockets_fit: bool


def check_storage(facts: Storage) -> Iterator[Finding]:
    yield _state(facts)
    yield _room("disk", facts.state, _STATE_NEEDS)
    yield _cache(facts.cache)


def open_to_others(folder: Folder) -> bool:
    """Whether other users may look into a folder of ours."""
    return folder.mode is not None and folder.is_mine and bool(folder.mode & _OTHERS)


def _state(facts: Storage) -> Finding:
    folder, elsewhere = facts.state, "set DYN_LOCAL_STATE_DIR to a folder of your own"
    if not folder.is_mine:
        return fail("state folder", f"{folder.path} belongs to another user", elsewhere)
    if not folder.is_writable:
        return fail("state folder", f"{folder.path} is not writable", elsewhere)
    if not facts.sockets_fit:
        return fail(
            "state folder", f"{folder.path} is too long for a unix socket", "set DYN_LOCAL_STATE_DIR to a shorter path"
        )
    for each in (folder, *facts.inner):
        if open_to_others(each):
            assert each.mode is not None
            remedy = f"`dynamo doctor --fix`, or: chmod 700 {each.path}"
            if each.mode & _OTHERS_WRITE:
                return fail("state folder", f"others can write to {each.path}", remedy)
            return warn("state folder", f"others can look into {each.path}", remedy)
    return ok("state folder", folder.path if folder.mode is not None else f"{folder.path} (made when it is needed)")


def _room(check: str, folder: Folder, needed: int) -> Finding:
    if folder.free is None:
        return warn(check, f"the room for {folder.path} is not known", "check the file system")
    found = f"{shown_bytes(folder.free)} free for {folder.path}"
    if folder.free < needed:
        return warn(check, f"{found}: {shown_bytes(needed)} should be", "free some room")
    return ok(check, found)


def _cache(folder: Folder) -> Finding:
    if not folder.is_writable:
        return warn(
            "cache folder",
            f"{folder.path} is not writable: models that are made or fetched cannot be kept",
            "set DYN_LOCAL_CACHE_DIR to a folder of your own",
        )
    room = _room("cache folder", folder, _CACHE_NEEDS)
    if room.level != "ok" or folder.size is None:
        return room
    return ok("cache folder", f"{room.found}, {shown_bytes(folder.size)} used")
