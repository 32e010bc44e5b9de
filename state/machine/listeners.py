"""Finds the process that listens on a TCP port, by /proc."""

from __future__ import annotations

import pwd
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from dynamo_local.core.names import NAMESPACE_ENV, WATCHER_ENV
from state.machine.processes import environment_of, pids

_PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")
_LISTENS = "0A"
# Columns of /proc/net/tcp, split at blanks.
_LOCAL, _STATE, _UID, _INODE = 1, 3, 7, 9

_Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Listener:
    """A process that listens on a port. Fields that are not known are None: the kernel shows the processes of others
    only to root. `namespace`: of the server that has started the process, if it is one of ours."""

    pid: int | None = None
    name: str | None = None
    user: str | None = None
    namespace: str | None = None

    def __str__(self) -> str:
        if self.namespace is not None:
            return f"the server of namespace {self.namespace} (pid {self.pid})"
        if self.pid is not None:
            return f"process {self.pid} ({self.name})"
        return f"a process of user {self.user}"


@dataclass(frozen=True)
class _Socket:
    address: _Address
    port: int
    uid: int
    inode: str


def listener_on(host: str, port: int) -> Listener | None:
    """The process that keeps `host` (an address) and port from being listened on; None if none is found."""
    wanted = ip_address(host)
    for found in _listening():
        if found.port == port and _collide(found.address, wanted):
            pid = _owner_of(found.inode)
            if pid is None:
                return Listener(user=_user(found.uid))
            return Listener(pid, _name(pid), _user(found.uid), _namespace(pid))
    return None


def _listening() -> Iterator[_Socket]:
    for table in _TABLES:
        with suppress(OSError):
            for line in (_PROC / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[_STATE] == _LISTENS:
                    address, _, port = fields[_LOCAL].partition(":")
                    yield _Socket(_address(address), int(port, 16), int(fields[_UID]), fields[_INODE])


def _address(digits: str) -> _Address:
    """Parse an address as the kernel writes it: words of 32 bits, each in the machine's byte order."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    return IPv4Address(data) if len(data) == 4 else IPv6Address(data)


def _collide(one: _Address, other: _Address) -> bool:
    return one == other or one.is_unspecified or other.is_unspecified


def _owner_of(inode: str) -> int | None:
    """The process that has the socket open: of several that have inherited it, the oldest of a server of ours, which
    names its namespace, or else the oldest."""
    owners = [pid for pid in sorted(pids()) if _has_open(pid, inode)]
    return next((pid for pid in owners if _namespace(pid) is not None), owners[0] if owners else None)


def _has_open(pid: int, inode: str) -> bool:
    with suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) == f"socket:[{inode}]":
                    return True
    return False


def _name(pid: int) -> str | None:
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return None


def _namespace(pid: int) -> str | None:
    environ = environment_of(pid)
    return environ.get(NAMESPACE_ENV) if WATCHER_ENV in environ else None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
