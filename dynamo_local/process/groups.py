"""Processes as the kernel shows them under /proc: children, who is left in a process group, and ending the whole group.

Every service is the leader of a group of its own, whether circusd has started it or the fork server has forked
it, so that what it forks can be found by its pid even when the service itself is gone. What leads a session of its own
cannot be:
that ends with the service (ancestry.py).
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
"""Against a process that forks while it is being killed."""


def members(group: int) -> tuple[int, ...]:
    """Living processes of a process group, zombies left out."""
    return tuple(pid for pid, _, group_id in _processes() if group_id == group)


def children_of(parent: int) -> tuple[int, ...]:
    """Living children of a process, zombies left out."""
    return tuple(pid for pid, parent_id, _ in _processes() if parent_id == parent)


def kill_group(group: int) -> None:
    """SIGKILL every process of the group. Harmless when none is left.

    Only Python's resource trackers are spared: they end by themselves once those that they serve are dead, and remove
    the shared memory which these have left.
    """
    if group <= 1:
        raise ValueError(f"{group} is not the process group of a service")
    looks_empty = False
    for _ in range(_ROUNDS):
        # Only a group that has members: its number cannot have been given to another one then.
        victims = [pid for pid in members(group) if not _is_resource_tracker(pid)]
        # Who forks and ends between being listed and being looked at hides its child: a second look finds that.
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
    """(pid, its parent's, its group) of all that live."""
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
