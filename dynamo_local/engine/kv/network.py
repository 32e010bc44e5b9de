"""The network in which KV is read between machines.

Reading it has neither authentication nor encryption. So it is off, unless the admin names a network that is closed: all
who reach it are trusted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from ipaddress import IPv4Network

from state.machine.interfaces import interface_in

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

    def __post_init__(self) -> None:
        network_of(self.kv_network)


@dataclass(frozen=True)
class ClosedNetwork:
    """Network, as CIDR, and this machine's interface in it. Both are empty where there is none."""

    cidr: str = ""
    device: str = ""


NO_NETWORK = ClosedNetwork()


def network_of(cidr: str) -> IPv4Network | None:
    """Parse it; None if it is empty. Raises ValueError."""
    if not cidr:
        return None
    try:
        return IPv4Network(cidr)
    except ValueError as error:
        raise ValueError(
            f"kv-network must be an IPv4 network such as 10.1.2.0/24, with no bits beyond its length, not {cidr!r}"
        ) from error


def network_here(settings: NetworkSettings, forbidden: str | None = None) -> ClosedNetwork:
    """The network as far as this machine has an interface in it. `forbidden`: why no port may be opened."""
    network = network_of(settings.kv_network)
    if network is None:
        return NO_NETWORK
    device = interface_in(network)
    why = forbidden or (None if device is not None else f"no interface has its address in {network} (kv-network)")
    if why is not None or device is None:
        _log.warning("KV of other machines is computed anew: %s", why)
        return NO_NETWORK
    return ClosedNetwork(str(network), device)
