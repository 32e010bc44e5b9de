"""The port to a cluster that is there already: who its nodes are, what is reserved on them, whether a node server runs.

A cluster chooses the node of a process and keeps others from its devices. It starts one program on a node, the node
server (supervisor/node), and says when a node is gone. What a node server does is asked of it over the bus. No request,
token or presence goes through the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_local.bus.jetstream.owner_record import RevisionError, decoded, encoded
from dynamo_local.core.process.ownership import Owner, Record
from dynamo_local.supervisor.places.port import Need, Slot
from state.devices.allocation import DeviceKind


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster. `is_alive`: False once the cluster has declared it dead. `devices`: number of devices
    (GPUs, or cores where there are none) that the cluster counts there, and `free` of them that are not reserved.
    `labels`: as the cluster has them. `kind`: of the devices; None: that of the head's own."""

    node: str
    is_alive: bool
    devices: float
    free: float
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: DeviceKind | None = None


class Cluster(Protocol):
    """A cluster. All methods raise SupervisorError when the cluster does not answer or refuses."""

    async def notes(self) -> Mapping[str, bytes]:
        """The notes that servers of this namespace have left, by name. One that is changed meanwhile may be missing."""

    async def add_note(self, name: str, data: bytes) -> bool:
        """Leave a note. False, and nothing is changed, if there is one of that name. After an error it may be there
        nevertheless."""

    async def remove_note(self, name: str) -> None:
        """Harmless if there is none of that name."""

    async def nodes(self) -> Mapping[str, ClusterNode]:
        """All nodes that the cluster knows, dead ones as well, by id."""

    async def reserve(self, name: str, need: Need, avoid: Collection[str] = ()) -> Slot:
        """Reserve what a process needs on one node, under a name that tells whose it is. Harmless if the name has it.
        `avoid`: nodes that are chosen only if no other one will do.

        Raises DeviceError, with how many devices are missing, if no node has them free; nothing is reserved then.
        """

    async def release(self, name: str) -> None:
        """Give back what is reserved under the name. Harmless without a reservation."""

    async def reservations(self) -> Mapping[str, Slot]:
        """What is reserved for this graph, by name; reservations on dead nodes are not among them."""

    async def start_node(self, node: str, order: bytes) -> None:
        """Have the node server run on that node. `order` is written to its standard input. Harmless if it runs.

        Raises NodeStartError with the last line of its log if it ends before it is ready.
        """

    async def end_node(self, node: str) -> None:
        """End the node server of that node, with all that it has started. Harmless if none runs."""

    async def close(self) -> None:
        """Let go of the cluster. What was started and reserved stays."""


__all__ = ["Cluster", "ClusterNode", "ClusterRecord", "Need", "Slot"]

_OWNER = "owner/"


@dataclass(frozen=True)
class ClusterRecord:
    """The record in the cluster of who owns the namespace there (supervisor/server/ownership.py): a note named after
    its revision, of which the newest counts. A note is never changed, so of two that replace one revision one fails."""

    cluster: Cluster

    async def make_room(self) -> None:
        """A cluster always has room."""

    async def read(self) -> Record:
        """The record as it is."""
        notes = await self._notes()
        newest = max(notes, default=0)
        return decoded(newest, notes.get(newest, b""))

    async def replace(self, revision: int, owner: Owner | None) -> int:
        """Replace the record of that revision. Returns the new one. Raises RevisionError if there is another by now."""
        mine = revision + 1
        is_added = await self.cluster.add_note(f"{_OWNER}{mine}", encoded(owner))
        notes = await self._notes()
        # Of a revision that was replaced long ago the next note is gone as well, and was added again.
        if not is_added or max(notes, default=mine) > mine:
            if is_added:
                await self.cluster.remove_note(f"{_OWNER}{mine}")
            raise RevisionError(f"the owner in the cluster has not revision {revision} any more")
        for former in notes:
            if former < mine:
                await self.cluster.remove_note(f"{_OWNER}{former}")
        return mine

    async def _notes(self) -> dict[int, bytes]:
        notes = await self.cluster.notes()
        return {int(name.removeprefix(_OWNER)): data for name, data in notes.items() if name.startswith(_OWNER)}
