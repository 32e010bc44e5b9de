"""The connections with Ray's processes, seen from the kernel's tables."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from state.machine.processes import pids
from tests.integration.server_process import parent_of

_LISTENS = "0A"


@dataclass(frozen=True)
class Connection:
    """A line of /proc/net/tcp. `waiting`: bytes that have come and were not read."""

    local: str
    remote: str
    state: str
    waiting: int
    inode: str


def agents_of(raylet: int) -> list[int]:
    """The actors of that raylet that run node servers."""
    return [pid for pid in pids() if parent_of(pid) == raylet and "NodeAgent" in _read(pid, "cmdline")]


@contextmanager
def frozen(*stopped: int) -> Iterator[None]:
    """Stop processes meanwhile. The first one goes on last: Ray's head declares nobody dead whom it finds
    at work."""
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)


def talks_to(askers: Collection[int], servers: Collection[int]) -> list[Connection]:
    """Connections of the first with the others, those included that were not taken yet."""
    found, theirs, ours = _connections(), _inodes(servers), _inodes(askers)
    places = {each.local for each in found if each.inode in theirs}
    ports = {each.local.rpartition(":")[2] for each in found if each.inode in theirs and each.state == _LISTENS}
    return [
        each
        for each in found
        if each.inode in ours and (each.remote in places or each.remote.rpartition(":")[2] in ports)
    ]


def received_from(senders: Collection[int], servers: Collection[int]) -> int:
    """Bytes that wait to be read by the others on their connections with the first."""
    remotes, theirs = {each.local for each in talks_to(senders, servers)}, _inodes(servers)
    return sum(each.waiting for each in _connections() if each.inode in theirs and each.remote in remotes)


def _connections() -> list[Connection]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, queues, _, _, _, _, inode, *_ = line.split()
            # An IPv4 address in the table for IPv6 ends with the same digits.
            local, remote = (f"{place.partition(':')[0][-8:]}:{place.partition(':')[2]}" for place in (local, remote))
            found.append(Connection(local, remote, state, int(queues.partition(":")[2], 16), inode))
    return found


def _inodes(owners: Collection[int]) -> set[str]:
    """The sockets that the processes have open."""
    found = set()
    for pid in owners:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    return found


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
