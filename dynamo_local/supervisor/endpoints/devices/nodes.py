"""The devices of the nodes of a cluster, for workers of endpoints: as its server has seen them a second ago."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dynamo_local.core.endpoints.devices import devices_of_worker
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.turns import placing
from dynamo_local.core.endpoints.turns.placing import less, node_of, on_node, placed
from dynamo_local.core.errors import DeviceError
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.core.shares import summed
from dynamo_local.supervisor.actuator.changes import template_of
from dynamo_local.supervisor.endpoints.revisions.observing import Room
from dynamo_local.supervisor.places.rooms import NodeRoom
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.devices.allocation import DeviceKind, Inventory, noun
from state.statefile.model import Component, State


@dataclass
class DevicesOfNodes:
    """The devices of a cluster's nodes (port.EndpointDevices). `rooms`: gives those of nodes that live; what others
    hold of them is of no interest to workers that compute nothing. `own`: devices of the graph's own workers at the
    start."""

    kind: DeviceKind
    rooms: Callable[[], Mapping[str, NodeRoom]]
    own: float = 0
    _numbers: dict[str, int] = field(default_factory=dict, init=False)
    """By node. They stay the same."""
    _next: Iterator[int] = field(default_factory=count, init=False)
    """Numbers that no node has, whichever threads ask at the same time."""

    def total(self) -> float:
        # With those that others hold now: who needs them waits, as on one machine.
        return summed([*(room.size for room in self.rooms().values()), -self.own])

    def room(self, state: State, blueprint: Blueprint, wanted: Sequence[AddWorker]) -> Room:
        for number, change in enumerate(wanted):
            template = template_of(blueprint, change)
            amounts = [template_of(blueprint, each).device_count for each in wanted[: number + 1]]
            if placed(self._left(state, virtual=template.virtual), amounts) is None:
                return Room(number, self._lacking(template.service, template.device_count))
        return Room(len(wanted))

    def free(self, state: State) -> placing.Room:
        # Who waits for a device of a node that cannot run him would wait for long.
        running = {node: room for node, room in self.rooms().items() if not room.is_failing}
        return self._left(state, virtual=False, rooms=running)

    def node(self, device: int) -> str:
        # A copy: another thread may number a node that joins.
        return next(node for node, number in self._numbers.copy().items() if number == node_of(device))

    def ids(self, component: Component) -> tuple[int, ...]:
        if component.node not in self.rooms():
            return ()
        return on_node(self._number(component.node), component.devices)

    def check_free(self, state: State, spec: EndpointSpec) -> None:
        needed = devices_of_worker(spec)
        if placed(self._left(state, virtual=spec.engine == "mocker"), [needed]) is None:
            raise DeviceError(self._lacking(spec.name, needed), "lower the workers of another endpoint, or add a node")

    def inventory(self) -> Inventory:
        return Inventory(self.kind, ())

    def _left(self, state: State, *, virtual: bool, rooms: Mapping[str, NodeRoom] | None = None) -> placing.Room:
        rooms = self.rooms() if rooms is None else rooms
        workers: dict[str, list[Component]] = {node: [] for node in rooms}
        for entry in state.components.values():
            if entry.holds and entry.node in rooms:
                workers[entry.node].append(entry)
        found: dict[int, float] = {}
        for node, room in rooms.items():
            left = left_of(room, [(entry.devices, entry.resources.share) for entry in workers[node]], virtual=virtual)
            ids = on_node(self._number(node), left)
            found |= dict(zip(ids, left.values(), strict=True))
        return found

    def _number(self, node: str) -> int:
        if node not in self._numbers:
            self._numbers.setdefault(node, next(self._next))
        return self._numbers[node]

    def _lacking(self, who: str, needed: float) -> str:
        devices = f"{needed:g} {noun(self.kind, 1 if needed <= 1 else 2)}"
        return f"{who} needs {devices} on one node of the cluster, and none has them free"


def left_of(room: NodeRoom, held: Sequence[tuple[tuple[int, ...], float]], *, virtual: bool) -> dict[int, float]:
    """What is left of each device of a node, by its id there. `held`: devices of each of the graph's workers there, and
    its share of each. Which ones others hold is not known: they are taken to be the last of those that no worker has,
    and to hold none if `virtual`. Pure."""
    ours = {device for devices, _ in held for device in devices}
    others = (number for number in count() if number not in ours)
    ids = (*sorted(ours), *(next(others) for _ in range(room.size - len(ours))))
    left = dict.fromkeys(ids, 1.0)
    for devices, share in held:
        left = less(left, devices, share)
    amount = 0.0 if virtual else room.others
    for device in reversed(ids):
        taken = min(left[device], amount)
        left, amount = less(left, [device], taken), summed([amount, -taken])
    return left
