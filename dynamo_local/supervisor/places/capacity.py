"""What is free of a server's devices, for whoever starts workers: those of its machine, or of the nodes of a cluster.

Which devices a worker gets is decided by `core.shares.placed` alone.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dynamo_local.core.errors import DeviceError
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.core.shares import Left, devices_of, less, node_of, on_node, placed, share_of, summed
from dynamo_local.supervisor.places.cluster import ClusterNode
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import DeviceKind, Inventory, allocate, gone_line, noun, shortage
from state.devices.holding import held_elsewhere
from state.devices.inventory import gone_devices
from state.machine.memory import Memory, machine_memory
from state.statefile.model import Component, State
from state.statefile.transitions import shares_taken


@dataclass(frozen=True)
class Startable:
    """How many of the wanted workers there are devices for, and what the next one lacks, in words. `gone`: why there
    would be no device for it even if nobody else had any; empty if there would."""

    workers: int = 0
    shortage: str = ""
    gone: str = ""


class Capacity(ABC):
    """The devices of one server's endpoints. Methods block for milliseconds. Devices of several nodes have ids of
    `shares.on_node`."""

    kind: DeviceKind

    @abstractmethod
    def total(self) -> float:
        """Number of devices that workers may have together, while others hold none."""

    @abstractmethod
    def left(self, state: State, *, virtual: bool = False) -> Left:
        """What is left of each device. What others hold is of no interest to workers that compute nothing."""

    @abstractmethod
    def lacking(self, left: Left, who: str, amount: float, *, virtual: bool) -> DeviceError:
        """The error that says why one of these devices is not enough for a worker that takes so much."""

    def free(self, state: State) -> Left:
        """What is left of each device that can run workers."""
        return self.left(state)

    def startable(self, state: State, templates: Sequence[ServiceTemplate]) -> Startable:
        """For how many workers, one of each of these templates, there are devices."""
        left = self.left(state, virtual=any(one.virtual for one in templates))
        for number, template in enumerate(templates):
            found = placed(left, [template.device_count])
            if found is None:
                error = self.lacking(left, template.service, template.device_count, virtual=template.virtual)
                return Startable(number, str(error), self.gone(templates[0]))
            left = less(left, found[0], template.share)
        return Startable(len(templates), gone=self.gone(templates[0]) if templates else "")

    def require(self, state: State, who: str, amount: float, *, virtual: bool) -> None:
        """Raise DeviceError if no devices are free for one more worker that takes so much."""
        left = self.left(state, virtual=virtual)
        if placed(left, [amount]) is None:
            raise self.lacking(left, who, amount, virtual=virtual)

    @abstractmethod
    def node(self, device: int) -> str:
        """The node of a device."""

    @abstractmethod
    def ids(self, component: Component) -> tuple[int, ...]:
        """Ids of a worker's devices; none of devices that are gone with their node."""

    def gone(self, template: ServiceTemplate) -> str:
        """Why a worker has no devices, whoever ends, as some are gone; empty if that is not so."""
        return ""

    def why_off(self, component: Component | None) -> str:
        """Which device of a worker is gone; empty if all are there."""
        return ""


@dataclass(frozen=True)
class MachineFacts:
    """What is asked of the machine before workers start or wake; by default this machine.

    `gone`: devices that are not there any more, by id, each with the reason. `memory`: of the machine, None if it is
    not known. Both block.
    """

    gone: Callable[[Inventory], Mapping[int, str]] = gone_devices
    memory: Callable[[], Memory | None] = machine_memory


THIS_MACHINE = MachineFacts()


@dataclass
class MachineCapacity(Capacity):
    """Of this machine. `own`: devices of the graph's own workers at the start."""

    all: Inventory
    facts: MachineFacts
    own: float = 0

    def __post_init__(self) -> None:
        self.kind = self.all.kind

    def total(self) -> float:
        return len(self.all.devices) - self.own

    def left(self, state: State, *, virtual: bool = False) -> Left:
        taken = shares_taken(state)
        free = self._inventory().free({} if virtual else self._elsewhere())
        return {device: max(0.0, 1 - taken.get(device, 0.0)) for device in free}

    def lacking(self, left: Left, who: str, amount: float, *, virtual: bool) -> DeviceError:
        taken = {device: 1 - part for device, part in left.items() if part < 1}
        elsewhere = {} if virtual else self._elsewhere()
        return shortage(self._inventory(), taken, devices_of(amount), who, elsewhere, share_of(amount))

    def node(self, device: int) -> str:
        return LOCAL_NODE

    def ids(self, component: Component) -> tuple[int, ...]:
        return component.devices

    def gone(self, template: ServiceTemplate) -> str:
        inventory = self._inventory()
        if inventory.gone:
            try:
                allocate(inventory, {}, template.devices, template.service, share=template.share)
            except DeviceError as error:
                return str(error)
        return ""

    def why_off(self, component: Component | None) -> str:
        inventory, devices = self._inventory(), () if component is None else component.devices
        lost = (number for number in devices if number in inventory.gone)
        return "; ".join(gone_line(inventory.kind, number, inventory.gone[number]) for number in lost)

    def _inventory(self) -> Inventory:
        return self.all.lacking(self.facts.gone(self.all))

    def _elsewhere(self) -> dict[int, str]:
        """The devices that others on the machine hold, and who holds them."""
        return {number: str(holder) for number, holder in held_elsewhere(self.all, os.getpid()).items()}


@dataclass(frozen=True)
class NodeCapacity:
    """The devices of a node that lives. `size`: their number, of which others hold `others`. `is_failing`: no node
    server could be had there lately."""

    size: int
    others: float = 0.0
    is_failing: bool = False


@dataclass
class ClusterCapacity(Capacity):
    """Of a cluster's nodes. `nodes`: gives those that live, as the server has seen them a second ago. `own`: devices of
    the graph's own workers at the start."""

    kind: DeviceKind
    nodes: Callable[[], Mapping[str, NodeCapacity]]
    own: float = 0
    _numbers: dict[str, int] = field(default_factory=dict, init=False)
    """By node. They stay the same."""
    _next: Iterator[int] = field(default_factory=count, init=False)
    """Numbers that no node has, whichever threads ask at the same time."""

    def total(self) -> float:
        # With those that others hold now: who needs them waits, as on one machine.
        return summed([*(node.size for node in self.nodes().values()), -self.own])

    def left(self, state: State, *, virtual: bool = False) -> Left:
        return self._left(state, self.nodes(), virtual=virtual)

    def free(self, state: State) -> Left:
        # Who waits for a device of a node that cannot run him would wait for long.
        running = {name: node for name, node in self.nodes().items() if not node.is_failing}
        return self._left(state, running, virtual=False)

    def lacking(self, left: Left, who: str, amount: float, *, virtual: bool) -> DeviceError:
        devices = f"{amount:g} {noun(self.kind, 1 if amount <= 1 else 2)}"
        return DeviceError(f"{who} needs {devices} on one node of the cluster, and none has them free")

    def node(self, device: int) -> str:
        # A copy: another thread may number a node that joins.
        return next(node for node, number in self._numbers.copy().items() if number == node_of(device))

    def ids(self, component: Component) -> tuple[int, ...]:
        if component.node not in self.nodes():
            return ()
        return on_node(self._number(component.node), component.devices)

    def _left(self, state: State, nodes: Mapping[str, NodeCapacity], *, virtual: bool) -> Left:
        workers: dict[str, list[Component]] = {name: [] for name in nodes}
        for entry in state.components.values():
            if entry.holds and entry.node in nodes:
                workers[entry.node].append(entry)
        found: dict[int, float] = {}
        for name, node in nodes.items():
            left = left_of(node, [(entry.devices, entry.resources.share) for entry in workers[name]], virtual=virtual)
            found |= dict(zip(on_node(self._number(name), left), left.values(), strict=True))
        return found

    def _number(self, node: str) -> int:
        if node not in self._numbers:
            self._numbers.setdefault(node, next(self._next))
        return self._numbers[node]


def left_of(node: NodeCapacity, held: Sequence[tuple[tuple[int, ...], float]], *, virtual: bool) -> dict[int, float]:
    """What is left of each device of a node, by its id there. `held`: devices of each of the graph's workers there, and
    its share of each. Which ones others hold is not known: they are taken to be the last of those that no worker has,
    and to hold none if `virtual`. Pure."""
    ours = {device for devices, _ in held for device in devices}
    others = (number for number in count() if number not in ours)
    ids = (*sorted(ours), *(next(others) for _ in range(node.size - len(ours))))
    left = dict.fromkeys(ids, 1.0)
    for devices, share in held:
        left = less(left, devices, share)
    amount = 0.0 if virtual else node.others
    for device in reversed(ids):
        taken = min(left[device], amount)
        left, amount = less(left, [device], taken), summed([amount, -taken])
    return left


def capacity_of_nodes(
    nodes: Mapping[str, ClusterNode],
    state: State,
    unclaimed: Iterable[tuple[str, float]] = (),
    failing: Collection[str] = (),
) -> dict[str, NodeCapacity]:
    """The devices of the nodes that live, by node. Pure. `state`: the graph's books. `unclaimed`: nodes and amounts of
    what is reserved for processes that the books do not have yet, or have released. `failing`: nodes without a node
    server."""
    held = held_on(state)
    for node, amount in unclaimed:
        held[node] = summed([held.get(node, 0.0), amount])
    return {
        name: NodeCapacity(
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


def device_count(nodes: Iterable[NodeCapacity]) -> float:
    """Number of devices that are free, or the graph's own."""
    return summed(node.size - node.others for node in nodes)


def held_on(state: State) -> dict[str, float]:
    """What the graph's processes hold of each node's devices, shares of them added up."""
    found: dict[str, float] = {}
    for entry in state.components.values():
        if entry.holds:
            found[entry.node] = summed([found.get(entry.node, 0.0), entry.device_count])
    return found
