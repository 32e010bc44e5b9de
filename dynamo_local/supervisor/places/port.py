"""The port between those who decide what runs and the places where it runs.

A process is born and ends in this order. Whatever is killed between two steps, what is left tells how far it came:

    reserve    the devices are nobody else's; named after the watcher, so that a reservation tells whose it is
    (claim)    the graph's statefile has the process, on these devices
    start      the process runs
    end        the process is gone, with all its children
    (release of the claim)
    release    the devices are free

A place implements `Places`, and passes tests/places_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.names import Watcher, check_node
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import Inventory

Status = Literal["active", "stopped", "unknown"]
"""Of a watcher's process. `active`: it runs, or is about to. `stopped`: it has ended. `unknown`: its place does not
answer. An unknown process may run: it keeps its devices, and its requests."""


class Need(msgspec.Struct, frozen=True):
    """What a process needs. `devices`: their number; with a `share` below 1, that part of one device. `virtual`: it
    computes nothing, and shares its devices with processes of others. `on`: ids of the devices, where a cluster has
    chosen them, otherwise empty. `node`: the only one that will do, where that is decided already; empty for any.
    `revision`: that it is to serve."""

    role: str
    devices: int
    share: float = 1.0
    virtual: bool = False
    on: tuple[int, ...] = ()
    node: str = ""
    revision: str = ""


class Slot(Message, frozen=True, tag="slot"):
    """What is reserved for a process on a node. `devices`: ids there of those that it has, or has a share of. Empty for
    a process without any, and where a cluster leaves their choice to the node server, as it does for CPU slots."""

    node: str
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_node(self.node)


class Place(msgspec.Struct, frozen=True):
    """A node that processes can live on. `reserved`: the watchers for which something is reserved there, and no process
    has been claimed.
    `given_up`: watchers of endpoints' workers whose processes are not started again, each with the reason."""

    node: str
    inventory: Inventory
    reserved: frozenset[str] = frozenset()
    given_up: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        check_node(self.node)


class LogPart(Message, frozen=True, tag="log"):
    """Lines of a log. `end`: the offset after them, in bytes."""

    lines: tuple[str, ...]
    end: int = 0


class Places(Protocol):
    """The places of one graph. All methods raise SupervisorError when a place does not answer or refuses."""

    async def places(self) -> Mapping[str, Place]:
        """The places that answer, by node."""

    async def reserve(self, watcher: Watcher, need: Need) -> Slot:
        """Reserve what a process needs, on one node. The devices that are reserved are those of no other process.

        Raises DeviceError if no place that will do has them free, NodeStartError if that place cannot run anything;
        nothing is reserved then.
        """

    async def start(self, plan: WatcherPlan) -> None:
        """Start the planned process, on the devices that are reserved for it. Harmless if it runs.

        Raises SupervisorError if they are not reserved: a process never runs on devices that may be another one's.
        """

    async def end(self, watcher: str, deadline_s: float) -> None:
        """Tell a watcher's process to end, wait until it and its children are gone, and forget it. Kills them at the
        deadline. Harmless when nothing runs. Raises SupervisorError if a process survives even that."""

    async def release(self, watcher: str) -> None:
        """Free what is reserved for a watcher whose process has ended. Harmless without a reservation.

        Raises SupervisorError while its process runs, or may run.
        """

    async def statuses(self) -> Mapping[str, Status]:
        """Status of every watcher. A watcher that is missing has no process, and is about to have none. One that a
        place that does not answer may have is `unknown`."""

    async def last_error(self, watcher: str) -> str | None:
        """The error in which the watcher's last process ended, as its log says; None if it names none."""

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        """The last complete lines of the watcher's log, of those `after` that offset in bytes if one is given; none if
        there is no log."""
