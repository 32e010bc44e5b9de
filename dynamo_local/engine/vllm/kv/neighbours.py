"""Other people on this machine, to whom NIXL's port on GPUs is open.

Where engines compute on GPUs, KV is read by NIXL, whose transport (UCX) listens on loopback TCP without authentication:
whoever connects can have it write to any address of the engine's process.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PEOPLE = range(1000, 65534)
"""Numbers of users who are persons, by the conventions of Linux distributions."""

_NO_SHELLS = ("nologin", "false")


@dataclass(frozen=True)
class NeighbourSettings:
    """What a worker with a GPU is told of them."""

    trust_local_users: bool = field(
        default=False,
        metadata={
            "help": "Whether kv-transfer on GPUs may open a port through which any user of this machine "
            "can write the memory of the engine."
        },
    )


def why_not_beside(others: Sequence[str], settings: NeighbourSettings) -> str | None:
    """Why the port is not to be opened; None if there is nobody else, or they are trusted."""
    if not others or settings.trust_local_users:
        return None
    return (
        "on GPUs it opens a port by which other users of this machine can write the engine's memory, and there are "
        f"others ({', '.join(others[:3])}); trust-local-users: true says that they may (docs/security.md)"
    )


def other_people() -> list[str]:
    """Names of those who can log in to this machine, or have processes on it, besides this process' user and root."""
    named = {user.pw_uid: user.pw_name for user in pwd.getpwall()}
    able = (user.pw_uid for user in pwd.getpwall() if Path(user.pw_shell).name not in _NO_SHELLS)
    others = {uid for uid in (*able, *_owners(Path("/proc").iterdir())) if uid in _PEOPLE and uid != os.geteuid()}
    return sorted(named.get(uid, str(uid)) for uid in others)


def _owners(processes: Iterable[Path]) -> Iterator[int]:
    for process in processes:
        if process.name.isdigit():
            try:
                yield process.stat().st_uid
            except FileNotFoundError:
                continue
