"""Holds devices on this machine, and tells which process holds which, across namespaces, state directories and users.

A holder binds the name of an abstract unix socket. The kernel gives a name to one owner at a time, and frees it when
the last process that has the socket open is gone:

    dynamo-local/device/NAME             the server that may start processes on the device
    dynamo-local/device/NAME/PID-NONCE   a process on the device, until it and all its children are gone

NAME is a GPU's UUID, or a core. A server first takes a device, then looks for processes of others on it. A process
first marks itself on the device, then looks whether its server still holds it. So between a server and a process of
another server that was killed, at least one sees the other, in whatever order they act.

Names are visible in one network namespace: containers that share devices, but no network, do not see each other. Any
user can bind a name; the kernel tells the pid and user of its owner.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import DEVICES_VARIABLE, Inventory

_ROOT = "dynamo-local/device/"
_ANSWER_WITHIN_S = 0.5
_MOST_BYTES = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Holder:
    """The process that has bound a name. Fields that are not known are None. `left_over`: its server does not hold the
    device any more."""

    pid: int | None = None
    user: str | None = None
    namespace: str | None = None
    left_over: bool = False

    def __str__(self) -> str:
        known = [f"pid {self.pid}"] if self.pid is not None else []
        known += [f"user {self.user}"] if self.user is not None else []
        details = f" ({', '.join(known)})" if known else ""
        if self.left_over:
            return f"a process of a server that has ended{details}"
        if self.namespace is None:
            return f"a process that says no more{details}"
        return f"the server of namespace {self.namespace}{details}"


class Bound(Protocol):
    """A name that this process has bound."""

    def close(self) -> None:
        """Free the name. Children that were forked meanwhile keep it bound until they are gone."""


class Names(Protocol):
    """The names of the machine. `AbstractNames` is the real implementation."""

    def bind(self, name: str) -> Bound | None:
        """Bind a name; None if another process has bound it."""

    def bound(self) -> Collection[str]:
        """All bound names, of devices and of processes on them."""

    def holder(self, name: str) -> Holder:
        """The process that has bound the name. All fields are None if the name is free by now."""


class AbstractNames:
    """Names of abstract unix sockets. `holder` waits up to half a second for an answer."""

    def bind(self, name: str) -> socket.socket | None:
        """Bind a name; None if another process has bound it. Raises DeviceError if the system forbids such names."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            bound.bind(f"\0{name}")
            bound.listen()
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise DeviceError(f"devices cannot be held: {error.strerror}", "allow abstract unix sockets") from error
        return bound

    def bound(self) -> frozenset[str]:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
        names = (line.rpartition(" @")[2] for line in lines if f" @{_ROOT}" in line)
        return frozenset(names)

    def holder(self, name: str) -> Holder:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_ANSWER_WITHIN_S)
            answer = b""
            try:
                asking.connect(f"\0{name}")
                pid, uid, _ = _CREDENTIALS.unpack(
                    asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
            except OSError:
                return Holder()
            with suppress(OSError):
                answer = asking.recv(_MOST_BYTES)
        # The pid is 0 if the holder is in a pid namespace that this process cannot see.
        return Holder(pid or None, _user(uid), answer.decode("ascii", "replace") or None)


NAMES = AbstractNames()


def introduce(listening: socket.socket, namespace: str) -> None:
    """Answer a process that asks for the holder of a name, if there is one, with the server's namespace."""
    with suppress(OSError):
        asking, _ = listening.accept()
        with asking:
            asking.setblocking(False)
            asking.send(namespace.encode("ascii"))


def device(name: str) -> str:
    """The name that the holder of a device binds."""
    return f"{_ROOT}{name}"


def on_device(bound: Iterable[str], name: str) -> tuple[str, ...]:
    """The bound names that belong to processes on the device."""
    return tuple(found for found in bound if found.startswith(f"{device(name)}/"))


def take(names: Names, wanted: Iterable[str]) -> dict[str, Bound]:
    """Hold devices, all or none. Raises HeldError for a device that another server holds, or that a process is on."""
    taken: dict[str, Bound] = {}
    try:
        for name in sorted(wanted):
            bound = names.bind(device(name))
            if bound is None:
                raise HeldError(name)
            taken[name] = bound
        found = names.bound()
        for name in taken:
            if on_device(found, name):
                raise HeldError(name)
    except BaseException:
        for bound in taken.values():
            bound.close()
        raise
    return taken


class HeldError(DeviceError):
    """Another server holds the device of that `name`, or a process is still on it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"device {name} was taken by somebody else meanwhile", "try again")
        self.name = name


def holder_of(names: Names, name: str, bound: Collection[str]) -> Holder | None:
    """The process that holds a device, or is left over on it; None if the device is free. `bound`: all bound names."""
    if device(name) in bound:
        return names.holder(device(name))
    for process in on_device(bound, name):
        pid = process.rpartition("/")[2].partition("-")[0]
        return Holder(int(pid) if pid.isdigit() else None, left_over=True)
    return None


def held(inventory: Inventory, but: Collection[int] = (), names: Names = NAMES) -> frozenset[int]:
    """The devices, except those in `but`, that a server holds or a process is left over on. Asks no holder.

    CPU slots may share a core: what those in `but` have is not held by others.
    """
    if not inventory.exclusive:
        return frozenset()
    bound = names.bound()
    own = frozenset(inventory.machine_names(but))
    return frozenset(
        device_id
        for device_id in inventory.free(but)
        for name in inventory.machine_names((device_id,))
        if name not in own and (device(name) in bound or on_device(bound, name))
    )


def held_elsewhere(
    inventory: Inventory, server: int, mine: Collection[int] = (), names: Names = NAMES
) -> dict[int, Holder]:
    """Devices that others hold than the server of that pid, each with its holder.

    `mine`: devices that are skipped, as the server's statefile claims them. Blocks until the holders have answered.
    """
    found: dict[int, Holder] = {}
    for device_id in sorted(held(inventory, mine, names)):
        for name in inventory.machine_names((device_id,)):
            holder = holder_of(names, name, names.bound())
            if holder is not None and (holder.pid != server or holder.left_over):
                found[device_id] = holder
    return found


def occupy(environ: Mapping[str, str], server: int, names: Names = NAMES) -> list[Bound]:
    """Mark this process, and all that it forks, as being on the devices that its environment names.

    `server`: pid of its server. Raises DeviceError unless that holds the devices: it was killed then, and another
    server may be about to take them.
    """
    marks = mark(environ, names)
    for name in _devices_of(environ):
        if names.holder(device(name)).pid != server:
            for bound in marks:
                bound.close()
            raise DeviceError(f"device {name} is not held by this process's server", "see whether that still runs")
    return marks


def mark(environ: Mapping[str, str], names: Names = NAMES) -> list[Bound]:
    """Mark this process as `occupy` does, without the check: for a child of a process that is on the devices itself."""
    own = f"{os.getpid()}-{secrets.token_hex(4)}"
    bound = [names.bind(f"{device(name)}/{own}") for name in _devices_of(environ)]
    return [each for each in bound if each is not None]


def _devices_of(environ: Mapping[str, str]) -> list[str]:
    named = environ.get(DEVICES_VARIABLE, "")
    return named.split(",") if named else []


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
