"""Which machine this is: what a clock's moments, a pid and a loopback address mean the same on."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

_PROC = Path("/proc")
_NAMESPACES = ("time", "net", "pid")
"""CLOCK_MONOTONIC may be offset in a time namespace; loopback addresses and pids are of their namespaces."""
_BYTES = 8


@cache
def machine_id() -> str:
    """Name of this machine since its start, by its boot id and the namespaces of this process.

    Two processes with the same name have one CLOCK_MONOTONIC, one loopback interface and one set of pids. Containers
    of one host are machines of their own. Empty: it cannot be told, and no other process is known to share it.
    """
    return identity_of(_PROC)


def identity_of(proc: Path) -> str:
    """The same by another /proc."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    parts = "|".join([boot, *(_namespace(proc / "self/ns" / name) for name in _NAMESPACES)])
    return blake2b(parts.encode(), digest_size=_BYTES).hexdigest() if boot else ""


def _namespace(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        # Kernels without such namespaces have no such link.
        return ""
