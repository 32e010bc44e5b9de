"""Holders of devices on this machine, across namespaces, state directories and users.

It is told by names of abstract unix sockets, which the kernel gives to one owner at a time, and takes back when the
last process is gone that has the socket open:

    dynamo-local/device/NAME             the server that may start processes on the device, for as long as it may
    dynamo-local/device/NAME/PID-NONCE   a process on the device, until it and all that it has forked are gone

NAME is a GPU's UUID, or a core. A server that takes a device looks for processes of others on it afterwards; a process
looks afterwards whether its server still holds it. So of a server and the process of another one that has been killed,
one sees the other, in whatever order things happen.

Names are those of one network namespace: containers that share devices, but no network, do not see each other. Any user
can take a name. Who answers to it is told by the kernel.
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
from state.devices import DEVICES_VARIABLE, Inventory

_ROOT = "dynamo-local/device/"
_ANSWER_WITHIN_S = 0.5
_MOST_BYTES = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Holder:
    """The process that has a name; unknown is None. `left_over`: of a server that holds the device no more."""

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
    """A name that this process has."""

    def close(self) -> None:
        """Give the name back. What was forked meanwhile has it, too."""


class Names(Protocol):
    """The machine's names. `AbstractNames` is the real one."""

    def bind(self, name: str) -> Bound | None:
        """Take a name; None if somebody has it."""

    def bound(self) -> Collection[str]:
        """All names of devices, and of processes on them, that somebody has."""

    def holder(self, name: str) -> Holder:
        """Tell which process has that name. It may be given back meanwhile."""


class AbstractNames:
    """Names of abstract unix sockets. `holder` waits for an answer for a moment."""

    def bind(self, name: str) -> socket.socket | None:
        """Raises DeviceError if there can be no such names here."""
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
            said = b""
            try:
                asking.connect(f"\0{name}")
                pid, uid, _ = _CREDENTIALS.unpack(
                    asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
            except OSError:
                return Holder()
            with suppress(OSError):
                said = asking.recv(_MOST_BYTES)
        # A process that this one cannot see has no pid here.
        return Holder(pid or None, _user(uid), said.decode("ascii", "replace") or None)


NAMES = AbstractNames()


def introduce(listening: socket.socket, namespace: str) -> None:
    """Tell who asks, if somebody does, whose server this is."""
    with suppress(OSError):
        asking, _ = listening.accept()
        with asking:
            asking.setblocking(False)
            asking.send(namespace.encode("ascii"))


def device(name: str) -> str:
    """The name that the holder of a device has."""
    return f"{_ROOT}{name}"


def on_device(bound: Iterable[str], name: str) -> tuple[str, ...]:
    """The names of processes on a device, among those that somebody has."""
    return tuple(found for found in bound if found.startswith(f"{device(name)}/"))


def take(names: Names, wanted: Iterable[str]) -> dict[str, Bound]:
    """Hold devices, all or none. Raises HeldError for one that somebody else holds, or is still on."""
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
    """Somebody else has the device of that `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"device {name} was taken by somebody else meanwhile", "try again")
        self.name = name


def holder_of(names: Names, name: str, bound: Collection[str]) -> Holder | None:
    """Tell which process holds a device, or is left over on it; None if it is free. `bound`: names in use."""
    if device(name) in bound:
        return names.holder(device(name))
    for process in on_device(bound, name):
        pid = process.rpartition("/")[2].partition("-")[0]
        return Holder(int(pid) if pid.isdigit() else None, left_over=True)
    return None


def held(inventory: Inventory, but: Collection[int] = (), names: Names = NAMES) -> frozenset[int]:
    """The devices that somebody holds or is left over on, without those of `but`. Asks nobody."""
    if not inventory.exclusive:
        return frozenset()
    bound = names.bound()
    return frozenset(
        device_id
        for device_id in inventory.free(but)
        for name in inventory.machine_names((device_id,))
        if device(name) in bound or on_device(bound, name)
    )


def held_elsewhere(
    inventory: Inventory, server: int, mine: Collection[int] = (), names: Names = NAMES
) -> dict[int, Holder]:
    """By device: who holds it that is not the server of that pid. `mine`: devices that are that one's by its own word.
    Blocks for as long as holders take to answer."""
    found: dict[int, Holder] = {}
    for device_id in sorted(held(inventory, mine, names)):
        for name in inventory.machine_names((device_id,)):
            holder = holder_of(names, name, names.bound())
            if holder is not None and (holder.pid != server or holder.left_over):
                found[device_id] = holder
    return found


def occupy(environ: Mapping[str, str], server: int, names: Names = NAMES) -> list[Bound]:
    """Have it known that this process, and all that it forks, are on the devices that its environment names.

    Raises DeviceError unless the server of that pid holds them: it has been killed, and somebody else may be about to
    take them.
    """
    marks = mark(environ, names)
    for name in _devices_of(environ):
        if names.holder(device(name)).pid != server:
            for bound in marks:
                bound.close()
            raise DeviceError(f"device {name} is not held by this process's server", "see whether that still runs")
    return marks


def mark(environ: Mapping[str, str], names: Names = NAMES) -> list[Bound]:
    """The same for a process that another one has started, which is on the devices itself."""
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
