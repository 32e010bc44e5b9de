"""Process groups and children, by /proc: lists their members, and kills a whole group.

Every service leads a process group, whether circusd has started it or the fork server has forked it. So its children
can be found by its pid even when the service itself is gone. Children that lead sessions of their own are no members,
but end with the service (ancestry.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_TRACKER = b"multiprocessing.resource_tracker"
_ROUNDS = 100
"""Rounds of killing, for a process that forks while it is being killed."""


def members(group: int) -> tuple[int, ...]:
    """Pids of the living processes of a process group, without zombies."""
    return tuple(pid for pid, _, group_id in _processes() if group_id == group)


def children_of(parent: int) -> tuple[int, ...]:
    """Pids of the living children of a process, without zombies."""
    return tuple(pid for pid, parent_id, _ in _processes() if parent_id == parent)


def kill_group(group: int) -> None:
    """SIGKILL every process of the group. Harmless when none is left.

    Python's resource trackers are spared: they end by themselves once the processes that they serve are dead, and
    remove the shared memory that these have left.
    """
    if group <= 1:
        raise ValueError(f"{group} is not the process group of a service")
    looks_empty = False
    for _ in range(_ROUNDS):
        # By member, not by killpg: while a group has members, its number cannot belong to another group.
        victims = [pid for pid in members(group) if not _is_resource_tracker(pid)]
        # A process that forks and ends between two steps of the listing hides its child. A second listing finds that.
        if not victims and looks_empty:
            return
        looks_empty = not victims
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return _TRACKER in (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes() -> Iterator[tuple[int, int, int]]:
    """Pid, parent's pid and group of every living process."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (comm) state ppid pgrp ...": comm may hold spaces and parentheses.
        state, parent, group, *_ = stat.rpartition(")")[2].split()
        if state not in ("Z", "X"):
            yield int(entry.name), int(parent), int(group)
