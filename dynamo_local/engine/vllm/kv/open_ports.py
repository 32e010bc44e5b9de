"""What an engine would open to others without authentication, and is refused: a port to users of this machine, a
publisher to whoever reaches it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import EngineError

# Other users of this machine, to whom NIXL's port on GPUs would be open.
#
# Where engines compute on GPUs, KV is read by NIXL, whose transport (UCX) listens on loopback TCP without
# authentication: anybody who connects can make it write to any address of the engine's process.

_PERSONS = range(1000, 65534)
"""User ids of persons, by the conventions of Linux distributions."""

_NO_SHELLS = ("nologin", "false")


def why_port_forbidden(others: Sequence[str], *, trusted: bool) -> str | None:
    """Say why the port must not be opened; None if there are no other users, or they are trusted."""
    if not others or trusted:
        return None
    return (
        "on GPUs it opens a port by which other users of this machine can write the engine's memory, and there are "
        f"others ({', '.join(others[:3])}); trust-local-users: true says that they may (docs/security.md)"
    )


def other_users() -> list[str]:
    """List the users who can log in to this machine, or have processes on it, besides this process' user and root."""
    named = {user.pw_uid: user.pw_name for user in pwd.getpwall()}
    able = (user.pw_uid for user in pwd.getpwall() if Path(user.pw_shell).name not in _NO_SHELLS)
    others = {uid for uid in (*able, *_owners(Path("/proc").iterdir())) if uid in _PERSONS and uid != os.geteuid()}
    return sorted(named.get(uid, str(uid)) for uid in others)


def _owners(processes: Iterable[Path]) -> Iterator[int]:
    for process in processes:
        if process.name.isdigit():
            try:
                yield process.stat().st_uid
            except FileNotFoundError:
                continue


# What is refused of vLLM's `kv-events-config`, which a user may set for a subscriber of their own.

_ANY_ADDRESS = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://:::")
"""How vLLM's publisher is told to listen on all addresses of the machine; its default endpoint is one of these."""


def check_events_config(config: Any) -> None:
    """Raise EngineError if vLLM would publish to everybody who reaches the machine. `config` is a vLLM KVEventsConfig,
    or None.

    vLLM's publisher has no authentication, and its events tell the tokens of all prompts.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is not None and endpoint.startswith(_ANY_ADDRESS):
            raise EngineError(
                f"kv-events-config would publish all prompts to whoever reaches this machine ({name} {endpoint})",
                "name a socket in a private folder instead: endpoint ipc:///PATH",
            )
