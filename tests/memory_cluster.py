"""A cluster in memory (supervisor/places/cluster.py): nodes that a test gives it, and what is reserved on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.errors import DeviceError
from dynamo_local.core.shares import fits, summed
from dynamo_local.supervisor.places.cluster import ClusterNode, Slot
from dynamo_local.supervisor.places.port import Need


async def _nothing(*_: object) -> None:
    pass


@dataclass
class MemoryCluster:
    """`sizes`: devices by node. `start`, `end`: called for node servers that are not running, and those that are."""

    sizes: Mapping[str, int]
    start: Callable[[str, bytes], Awaitable[None]] = _nothing
    end: Callable[[str], Awaitable[None]] = _nothing
    dead: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    reserved: dict[str, tuple[str, float]] = field(default_factory=dict)
    left: dict[str, bytes] = field(default_factory=dict)
    """Notes."""
    asked: int = 0
    """How often the cluster was asked for its nodes."""

    async def notes(self) -> Mapping[str, bytes]:
        return dict(self.left)

    async def add_note(self, name: str, data: bytes) -> bool:
        if name in self.left:
            return False
        self.left[name] = data
        return True

    async def remove_note(self, name: str) -> None:
        self.left.pop(name, None)

    async def nodes(self) -> Mapping[str, ClusterNode]:
        self.asked += 1
        return {
            node: ClusterNode(node, node not in self.dead, size, size - self._used(node))
            for node, size in self.sizes.items()
        }

    async def reserve(self, name: str, need: Need, avoid: Collection[str] = ()) -> Slot:
        needed = need.devices * need.share
        if name not in self.reserved:
            roomy = [n for n in self.sizes if need.node in ("", n) and self._has_room(n, needed)]
            roomy = [node for node in roomy if node not in avoid] or roomy
            if not roomy:
                raise DeviceError("no node has them free", "ask for fewer")
            # Shares are to be of one device, and whole workers on all nodes.
            node = max(roomy, key=self._used) if need.share < 1 else min(roomy, key=self._used)
            self.reserved[name] = (node, needed)
        return Slot(self.reserved[name][0])

    async def release(self, name: str) -> None:
        self.reserved.pop(name, None)

    async def reservations(self) -> Mapping[str, Slot]:
        return {name: Slot(node) for name, (node, _) in self.reserved.items() if node not in self.dead}

    async def start_node(self, node: str, order: bytes) -> None:
        if node not in self.running:
            self.running.add(node)
            await self.start(node, order)

    async def end_node(self, node: str) -> None:
        if node in self.running:
            self.running.remove(node)
            await self.end(node)

    async def close(self) -> None:
        pass

    def _used(self, node: str) -> float:
        return summed(needed for where, needed in self.reserved.values() if where == node)

    def _has_room(self, node: str, needed: float) -> bool:
        return node not in self.dead and fits(self._used(node), needed, self.sizes[node])
