"""Network interfaces of this machine, with their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256

_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40


def interfaces() -> dict[str, IPv4Address]:
    """The first IPv4 address of each interface that has one and by which other machines are reached, by the
    interface's name."""
    found: dict[str, IPv4Address] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode()[:15])
            try:
                flags: int = struct.unpack_from("H", fcntl.ioctl(asking.fileno(), _SIOCGIFFLAGS, request), 16)[0]
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # It has no address, or is gone.
                continue
            if reaches_others(flags):
                found[name] = IPv4Address(answer[20:24])
    return found


def network_of(cidr: str) -> IPv4Network:
    """Parse a network. Raises ValueError, with words to follow the name of the setting."""
    try:
        return IPv4Network(cidr)
    except ValueError as error:
        raise ValueError(
            f"must be an IPv4 network such as 10.1.2.0/24, with no bits beyond its length, not {cidr!r}"
        ) from error


def reaches_others(flags: int) -> bool:
    """Whether an interface with these flags (SIOCGIFFLAGS) is in use, and not that of the machine with itself, whose
    addresses mean another machine on each. One that is down keeps its address."""
    return flags & (_UP | _RUNNING | _LOOPBACK) == _UP | _RUNNING


def interface_in(network: IPv4Network, found: Mapping[str, IPv4Address] | None = None) -> str | None:
    """Name of the first of these interfaces whose first address lies in this network; None if there is none."""
    addresses = interfaces() if found is None else found
    return next((name for name, address in addresses.items() if address in network), None)
