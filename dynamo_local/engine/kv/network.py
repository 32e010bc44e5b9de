"""How KV is read between machines.

In a network that the admin declares closed, reading has neither authentication nor encryption: all who reach it are
trusted. On a TLS stream, readers and sources know each other by what has crossed the bus. Without either, KV of other
machines is computed anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

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
