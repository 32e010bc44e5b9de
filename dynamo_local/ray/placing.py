"""Which node a reservation is made on. Pure.

A reservation is a placement group of one bundle, which is bound to the node that is chosen here: when the node dies,
Ray cannot have the group elsewhere, and it is lost.

Nodes that have reservations of the graph come first, then those with the least room that is enough: KV stays on one
machine, nodes for large workers stay free, and an autoscaler may remove the others. Nodes in trouble come last. Where
the node is decided already, no other one will do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dynamo_local.core.errors import DeviceError
from dynamo_local.core.shares import fits, held, summed
from dynamo_local.supervisor.places.cluster import ClusterNode
from dynamo_local.supervisor.places.port import Need
from state.devices.allocation import DeviceKind

GPU, CPU, MEMORY = "GPU", "CPU", "memory"
_VIRTUAL_BYTES = 100
"""Memory that stands for a device of a virtual worker, which needs none: it takes nothing from others."""


@dataclass(frozen=True)
class Group:
    """A placement group. `node`: empty while it has none. `bundle`: what it takes there. `is_made`: whether it has all
    of that. `key`: Ray's id, which no other group has."""

    name: str
    node: str
    bundle: Mapping[str, float]
    is_made: bool = True
    key: str = ""

    @property
    def devices(self) -> float:
        """The number of devices that it stands for."""
        if GPU in self.bundle or CPU in self.bundle:
            return self.bundle.get(GPU, self.bundle.get(CPU, 0))
        return self.bundle.get(MEMORY, 0) / _VIRTUAL_BYTES


@dataclass(frozen=True)
class RayNode:
    """A node as Ray has it. `total`, `available`: amounts of its resources."""

    node: str
    is_alive: bool
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str]


def bundle_of(need: Need, resource: str) -> dict[str, float]:
    """What a process takes of its node. `resource`: the devices of the cluster, GPU or CPU."""
    devices = held(need.devices, need.share)
    return {MEMORY: max(1, round(devices * _VIRTUAL_BYTES))} if need.virtual or devices == 0 else {resource: devices}


def resource_of(nodes: Iterable[RayNode]) -> str:
    """The devices of a cluster: GPUs, or cores where no node has one."""
    return GPU if any(node.is_alive and node.total.get(GPU, 0) >= 1 for node in nodes) else CPU


def counted(nodes: Iterable[RayNode], groups: Iterable[Group], mine: str) -> dict[str, ClusterNode]:
    """The nodes by id, with their devices. `mine`: prefix of the graph's groups."""
    nodes, groups, found = list(nodes), list(groups), {}
    resource = resource_of(nodes)
    kind: DeviceKind = "gpu" if resource == GPU else "cpu-slot"
    for node in nodes:
        total = node.total.get(resource, 0) if node.is_alive else 0
        here = [group for group in groups if group.node == node.node]
        reserved = summed(group.bundle.get(resource, 0) for group in here)
        own = summed(group.devices for group in here if group.name.startswith(mine))
        # Ray's own count of what is available runs after the table of groups.
        free = max(0, min(total - reserved, total - own, node.available.get(resource, 0)))
        found[node.node] = ClusterNode(node.node, node.is_alive, total, free, node.labels, kind)
    return found


def choose(
    nodes: Mapping[str, ClusterNode], groups: Iterable[Group], mine: str, need: Need, avoid: Collection[str] = ()
) -> list[str]:
    """The nodes that have what a process needs, the best first, and those to `avoid` last. Raises DeviceError if none
    has."""
    needed = held(need.devices, need.share)
    used: dict[str, float] = {}
    for group in groups:
        if group.name.startswith(mine):
            used[group.node] = used.get(group.node, 0) + group.devices
    alive = [node for node in nodes.values() if node.is_alive and need.node in ("", node.node)]
    room = {node.node: node.devices - used.get(node.node, 0) if need.virtual else node.free for node in alive}
    roomy = [node for node in room if fits(0, needed, room[node])]
    if not roomy:
        raise lacking(need, room)
    return sorted(roomy, key=lambda node: (node in avoid, node not in used, room[node], node))


def lacking(need: Need, room: Mapping[str, float]) -> DeviceError:
    """How many devices are missing on which nodes. `room`: devices that are free, by node."""
    needed = held(need.devices, need.share)
    most = sorted(room, key=lambda node: (-room[node], node))
    listed = [f"{summed([needed, -room[node]]):g} on {node[:8]} ({room[node]:g} free)" for node in most[:4]]
    more = f" and {len(most) - 4} other nodes" if len(most) > 4 else ""
    cause = f"the Ray cluster has them free on no node; missing are {', '.join(listed)}{more}"
    if need.node:
        cause = f"they are to be on one node of the Ray cluster; missing are {', '.join(listed)}"
    remedy = "ask for fewer workers or devices a worker, or add a node to the cluster"
    absent = (
        f"node {need.node} is not alive in the Ray cluster"
        if need.node
        else "the Ray cluster has no node that is alive"
    )
    return DeviceError(cause if room else absent, remedy)
