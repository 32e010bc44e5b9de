"""How many devices the nodes of a cluster have, and how many of them others hold. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dynamo_local.core.shares import summed
from dynamo_local.supervisor.places.cluster import ClusterNode
from state.devices.allocation import DeviceKind
from state.statefile.model import State


@dataclass(frozen=True)
class NodeRoom:
    """The devices of a node that lives. `size`: their number, of which others hold `others`. `is_failing`: no node
    server could be had there lately."""

    size: int
    others: float = 0.0
    is_failing: bool = False


def rooms_of(
    nodes: Mapping[str, ClusterNode],
    state: State,
    left: Iterable[tuple[str, float]] = (),
    failing: Collection[str] = (),
) -> dict[str, NodeRoom]:
    """The rooms of the nodes that live, by node. `state`: the graph's books. `left`: nodes and amounts of what is still
    reserved for processes that the books do not have yet, or have released. `failing`: nodes without a node server."""
    held = held_on(state)
    for node, amount in left:
        held[node] = summed([held.get(node, 0.0), amount])
    return {
        name: NodeRoom(
            int(node.devices),
            max(0.0, summed([int(node.devices), -node.free, -held.get(name, 0.0)])),
            name in failing,
        )
        for name, node in nodes.items()
        if node.is_alive
    }


def kind_of(nodes: Iterable[ClusterNode], head: DeviceKind) -> DeviceKind:
    """The kind of the devices of the nodes that live; that of the head's own where the cluster does not say it."""
    return next((node.kind for node in nodes if node.is_alive and node.kind is not None), head)


def device_count(rooms: Iterable[NodeRoom]) -> float:
    """Number of devices that are free, or the graph's own."""
    return summed(room.size - room.others for room in rooms)


def held_on(state: State) -> dict[str, float]:
    """What the graph's processes hold of each node's devices, shares of them added up."""
    found: dict[str, float] = {}
    for entry in state.components.values():
        if entry.holds:
            found[entry.node] = summed([found.get(entry.node, 0.0), entry.device_count])
    return found
