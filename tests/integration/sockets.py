"""Sockets as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

LISTENS = "0A"
LOOPBACK = "0100007F"


def kernel_sockets(protocol: str) -> list[list[str]]:
    """Rows of /proc/net/tcp and its like, split into fields."""
    return [line.split() for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]]


def socket_inodes(pid: int) -> set[str]:
    """Inodes of all sockets that a process has open."""
    targets = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    return {target[8:-1] for target in targets if target.startswith("socket:[")}
