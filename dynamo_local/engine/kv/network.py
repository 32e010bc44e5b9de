"""How KV is read between machines, and what an engine would open to others and is refused.

In a network that the admin declares closed, reading has neither authentication nor encryption: all who reach it are
trusted. On a TLS stream, readers and sources know each other by what has crossed the bus. Without either, KV of other
machines is computed anew.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import TLS_STREAM
from state.machine.interfaces import interface_in, network_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of a worker about other machines."""

    kv_network: str = field(
        default="",
        metadata={
            "help": "Network, as 10.1.2.0/24, that the admin declares closed: workers with an address in it read KV "
            "from each other between machines, without authentication or encryption. Empty: such KV is computed anew."
        },
    )
    kv_stream: bool = field(
        default=False,
        metadata={
            "help": "Whether workers read KV from each other between machines on TLS streams, where the bus is on TLS "
            "too. For engines on CPUs. Excludes kv-network."
        },
    )

    def __post_init__(self) -> None:
        if not self.kv_network:
            return
        if self.kv_stream:
            raise ValueError("kv-network and kv-stream exclude each other: KV crosses machines in one way")
        try:
            network_of(self.kv_network)
        except ValueError as error:
            raise ValueError(f"kv-network {error}") from error


@dataclass(frozen=True)
class FarKv:
    """How this machine's engine and those of others read each other's KV. All are empty where they do not."""

    network: str = ""
    """What both must name: the closed network (CIDR), or TLS_STREAM."""
    device: str = ""
    """This machine's interface in the closed network."""
    host: str = ""
    """This machine's address, for streams."""


NO_FAR_KV = FarKv()


def far_kv_here(
    settings: NetworkSettings, *, bus_host: str = "", no_port: str | None = None, no_stream: str | None = None
) -> FarKv:
    """What the settings come to on this machine. `bus_host`: its address on a bus of TLS. `no_port`: why no port
    without authentication may be opened; `no_stream`: why this engine has no stream."""
    if settings.kv_stream:
        why = no_stream or (None if bus_host else "the bus is not on TLS (--bus-host, or a tls:// address; kv-stream)")
        found = FarKv(TLS_STREAM, host=bus_host)
    elif settings.kv_network:
        network = network_of(settings.kv_network)
        device = interface_in(network)
        none = f"no interface has its address in {network} (kv-network)"
        why = no_port or (none if device is None else None)
        found = FarKv(str(network), device=device or "")
    else:
        return NO_FAR_KV
    if why is None:
        return found
    _log.warning("KV of other machines is computed anew: %s", why)
    return NO_FAR_KV


# What an engine would open to others without authentication, and is refused: a port to users of this machine, a
# publisher to whoever reaches it.

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
