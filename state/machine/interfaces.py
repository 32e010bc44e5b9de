"""Network interfaces of this machine, with their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256


def interfaces() -> dict[str, IPv4Address]:
    """The first IPv4 address of each interface that has one, by the interface's name."""
    found: dict[str, IPv4Address] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # It has no address.
                continue
            found[name] = IPv4Address(answer[20:24])
    return found


def interface_in(network: IPv4Network, found: Mapping[str, IPv4Address] | None = None) -> str | None:
    """Name of the first interface whose first address lies in this network; None if there is none."""
    addresses = interfaces() if found is None else found
    return next((name for name, address in addresses.items() if address in network), None)
