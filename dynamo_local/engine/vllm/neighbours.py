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

from dynamo_local.core.errors import EngineError

_PEOPLE = range(1000, 65534)
"""Numbers of users who are persons, by the conventions of Linux distributions."""

_NO_SHELLS = ("nologin", "false")


@dataclass(frozen=True)
class NeighbourSettings:
    """What a worker with a GPU is told of them."""

    trust_local_users: bool = field(
        default=False,
        metadata={"help": "kv-transfer on GPUs may open a port by which any user of this machine can write its memory"},
    )


def refuse_beside(others: Sequence[str], settings: NeighbourSettings) -> None:
    """Raise EngineError unless there is nobody to whom the port would be open, or they are trusted."""
    if others and not settings.trust_local_users:
        raise EngineError(
            "kv-transfer on GPUs opens a port through which other users of this machine can write the engine's memory, "
            f"and there are others ({', '.join(others[:3])})",
            "set kv-transfer: false, or trust-local-users: true if they may (docs/security.md)",
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
