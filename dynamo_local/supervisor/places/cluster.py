"""The port to a cluster that is there already: who its nodes are, what is reserved on them, whether a node server runs.

A cluster chooses the node of a process and keeps others from its devices. It starts one program on a node, the node
server (supervisor/node), and says when a node is gone. What a node server does is asked of it over the bus. No request,
token or presence goes through the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

from dynamo_local.core.errors import UsageError
from dynamo_local.supervisor.places.port import Need, Slot
from dynamo_local.supervisor.server.launch.plan import LOCAL
from state.devices.allocation import DeviceKind

__all__ = ["Cluster", "ClusterNode", "Need", "Slot"]


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


# The environments in which the workers of a graph can live, by name. Each is imported only where it is used.

_CLUSTERS = {"ray": "dynamo_local.ray.cluster:RayCluster"}


def check_environment(name: str) -> str:
    """Return the name, or raise UsageError: that of an environment, or MODULE:CLASS of another cluster."""
    if name != LOCAL and name not in _CLUSTERS and ":" not in name:
        known = ", ".join((LOCAL, *_CLUSTERS))
        raise UsageError(f"there is no environment {name!r}", f"there are: {known}; or MODULE:CLASS of a cluster")
    return name


async def connect(environment: str, namespace: str, address: str | None) -> Cluster:
    """Connect to the cluster of an environment, for the graph of a namespace. `address`: as the cluster takes it.

    Raises UsageError if it is not installed, SupervisorError if it cannot be reached.
    """
    module, _, name = _CLUSTERS.get(environment, environment).partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        extra = f"install dynamo-local[{environment}]" if environment in _CLUSTERS else "check the name"
        raise UsageError(f"environment {environment} cannot be used: {error}", extra) from error
    cluster: Cluster = await kind.connect(namespace, address)
    return cluster
