"""The places of a graph whose workers live on the nodes of a cluster (cluster.py). Runs in the head's server, which
answers for it on the bus (service.py).

Each worker's devices are reserved with the cluster first, under the name NAMESPACE/WATCHER, then with the node server
of the node that the cluster has chosen; and backwards. A node server stands only where something is reserved. The
graph's other processes live on the head's machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dynamo_local.core.errors import DynamoError, SilentNodeError, StateError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import LOCAL_NODE, Watcher, parse_watcher
from dynamo_local.core.shares import summed
from dynamo_local.supervisor.actuator.side_by_side import side_by_side
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.cluster import Cluster, ClusterNode, Slot
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Places, Reservation, Status
from dynamo_local.supervisor.places.slots import Slots
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import Device, DeviceKind, Inventory
from state.statefile.model import Component, State


@dataclass
class ClusterPlaces:
    """Places on the nodes of a cluster, and the head's own machine (port.Places).

    `slots`: what is reserved with it. `local`: places of the head. `node(id)`: the places of a node server.
    `order(node)`: what a node server is started with. `graph(revision)`: the graph of an endpoint's revision as JSON.
    `is_heard(watcher)`: whether a process of that name has a presence on the bus. `kind`: of the cluster's devices.
    """

    cluster: Cluster
    slots: Slots
    books: Books
    local: Places
    node: Callable[[str], FarPlaces]
    order: Callable[[ClusterNode], bytes]
    graph: Callable[[str], bytes]
    is_heard: Callable[[str], bool]
    kind: DeviceKind
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a reservation is made or given back: a node server ends with the last one, and starts with the
    first."""
    _learned: set[tuple[str, str]] = field(default_factory=set, init=False)
    """Nodes and revisions whose graph they know."""
    _prepared: set[str] = field(default_factory=set, init=False)
    """Watchers for which `reserve` is to follow: no leaks."""
    _given_up: set[str] = field(default_factory=set, init=False)
    """Nodes whose node server did not answer, and was ended by the cluster: nothing runs there."""

    async def places(self) -> Mapping[str, Place]:
        state, nodes, slots = await self.books.read(), await self.cluster.nodes(), await self.slots.all()
        found = dict(await self.local.places())
        standing = self._standing(state, slots) - self._given_up
        answers = await asyncio.gather(*(self._place(node) for node in standing))
        found |= {place.node: place for place in answers if place is not None}
        others = [node for name, node in nodes.items() if node.is_alive and name not in standing]
        found |= {node.node: Place(node.node, _as_counted(node, self.kind), {}) for node in others}
        unprepared = {name: slot for name, slot in slots.items() if name not in self._prepared}
        return {name: _unclaimed(place, state, unprepared) for name, place in found.items()}

    async def reserve(self, watcher: Watcher, need: Need) -> Reservation:
        if need.role not in ENGINE_ROLES:
            return await self.local.reserve(watcher, need)
        async with self._changing:
            name = str(watcher)
            entry = (await self.books.read()).components.get(name)
            if entry is not None and entry.holds:
                raise StateError(f"{name} has a reservation already", "release it first")
            is_new = name not in await self.slots.all()
            self._prepared.discard(name)
            slot = await self.slots.reserve(watcher, need)
            try:
                await self._have_node(slot.node)
                reserved = await self.node(slot.node).reserve(watcher, replace(need, on=slot.devices))
            except DynamoError:
                if is_new:
                    await self._give_back(name, slot.node)
                raise
            return replace(reserved, node=slot.node)

    async def prepare(self, needs: Mapping[Watcher, Need]) -> None:
        """Reserve for several watchers with the cluster, and start the node servers at the same time. `reserve` is to
        follow for each. What was reserved when this raises is left."""
        async with self._changing:
            self._prepared |= {str(watcher) for watcher in needs}
            slots = [await self.slots.reserve(watcher, need) for watcher, need in needs.items()]
            await side_by_side(map(self._have_node, sorted({slot.node for slot in slots})))

    async def start(self, reservation: Reservation, plan: WatcherPlan) -> None:
        if reservation.node == LOCAL_NODE:
            await self.local.start(reservation, plan)
            return
        entry = (await self.books.read()).components.get(plan.name)
        if plan.name not in await self.slots.all():
            raise SupervisorError(f"{plan.name} has not reserved {list(reservation.devices)}", "reserve them first")
        node, revision = self.node(reservation.node), plan.watcher.revision
        if revision and (reservation.node, revision) not in self._learned:
            await node.learn(revision, await asyncio.to_thread(self.graph, revision))
            self._learned.add((reservation.node, revision))
        # The node plans command and environment by its own paths. A process that replaces another keeps its role.
        role = plan.role if entry is None else entry.role
        await node.start(replace(reservation, node=LOCAL_NODE), replace(plan, role=role, argv=(), environment={}))

    async def end(self, watcher: str, deadline_s: float) -> None:
        node = await self._node_of(watcher)
        if node is None or await self._is_lost(node, watcher):
            return
        await (self.local if node == LOCAL_NODE else self.node(node)).end(watcher, deadline_s)

    async def release(self, watcher: str) -> None:
        node = await self._node_of(watcher)
        if node == LOCAL_NODE:
            await self.local.release(watcher)
            return
        async with self._changing:
            if node is not None and not await self._is_lost(node, watcher):
                await self.node(node).release(watcher)
            await self._give_back(watcher, node)

    async def statuses(self) -> Mapping[str, Status]:
        state, slots = await self.books.read(), await self.slots.all()
        local = await self.local.statuses()
        here = {name: c for name, c in local.items() if name not in slots and _node(state, name) in (None, LOCAL_NODE)}
        found: dict[str, Status] = dict(here)
        for node in self._standing(state, slots):
            try:
                found |= await self.node(node).statuses()
            except SupervisorError:
                mine = [name for name, entry in state.components.items() if entry.node == node and entry.holds]
                found |= {name: "unknown" for name in mine if not await self._is_lost(node, name)}
        return found

    async def last_error(self, watcher: str) -> str | None:
        places = await self._places_of(watcher)
        try:
            return None if places is None else await places.last_error(watcher)
        except SilentNodeError:
            return None

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        places = await self._places_of(watcher)
        return LogPart(()) if places is None else await places.log(watcher, lines, after)

    async def give_up(self, node: str) -> None:
        """Have the cluster end a node server that does not answer: nothing of it runs then. Raises SupervisorError."""
        async with self._changing:
            if await self._place(node) is not None:
                # It was only starting.
                return
            await self.cluster.end_node(node)
            self._given_up.add(node)

    async def end_all(self) -> None:
        """End all node servers, and give back all that is reserved. Raises SupervisorError if that fails somewhere."""
        async with self._changing:
            claimed = _claimed_nodes(await self.books.read())
            await self.slots.clear(claimed)

    async def lost(self) -> tuple[Component, ...]:
        """The claims on nodes whose processes are gone, and of which no change is under way."""
        state = await self.books.read()
        statuses = await self.statuses()
        far = (entry for entry in state.components.values() if entry.holds and entry.node != LOCAL_NODE)
        return tuple(entry for entry in far if entry.phase is None and entry.watcher_name not in statuses)

    async def silent(self) -> frozenset[str]:
        """The nodes that the cluster takes for alive, that do not answer, and of whose processes nothing is heard."""
        state, nodes, slots = await self.books.read(), await self.cluster.nodes(), await self.slots.all()
        found: set[str] = set()
        for node in self._standing(state, slots) - self._given_up:
            mine = [name for name, entry in state.components.items() if entry.node == node and entry.holds]
            is_alive = node in nodes and nodes[node].is_alive
            if is_alive and not any(map(self.is_heard, mine)) and await self._place(node) is None:
                found.add(node)
        return frozenset(found)

    async def device_count(self) -> float:
        """Number of devices on nodes that live that are free, or the graph's own."""
        state, nodes = await self.books.read(), await self.cluster.nodes()
        alive = {name: node for name, node in nodes.items() if node.is_alive}
        held = (entry.device_count for entry in state.components.values() if entry.node in alive)
        return summed([*held, *(node.free for node in alive.values())])

    async def leaks(self) -> frozenset[str]:
        """Watchers for which the cluster has reserved something, and that the books do not know."""
        state = await self.books.read()
        unclaimed = frozenset(name for name in await self.slots.all() if _node(state, name) is None)
        return unclaimed - self._prepared

    # What the cluster has, and the nodes of watchers.

    def _standing(self, state: State, slots: Mapping[str, Slot]) -> set[str]:
        """The nodes on which something of the graph is, or may be."""
        return _claimed_nodes(state) | {slot.node for slot in slots.values()}

    async def _node_of(self, watcher: str) -> str | None:
        """The node of a watcher, by the books or else by its reservation; None if nobody knows it."""
        entry = (await self.books.read()).components.get(watcher)
        if entry is not None and entry.holds:
            return entry.node
        slot = (await self.slots.all()).get(watcher)
        if slot is not None:
            return slot.node
        return LOCAL_NODE if (await self.local.statuses()).get(watcher, "unknown") != "unknown" else None

    async def _places_of(self, watcher: str) -> Places | None:
        node = await self._node_of(watcher)
        if node is None:
            return None
        return self.local if node == LOCAL_NODE else self.node(node)

    async def _is_lost(self, node: str, watcher: str) -> bool:
        """Whether the cluster has declared the node dead, and nothing is heard of the watcher: what it held is free."""
        found = (await self.cluster.nodes()).get(node) if node != LOCAL_NODE else None
        is_dead = node != LOCAL_NODE and (found is None or not found.is_alive or node in self._given_up)
        return is_dead and not self.is_heard(watcher)

    # Node servers.

    async def _have_node(self, name: str) -> None:
        """Have a node server of this graph's server answer on the node."""
        try:
            await self.node(name).places()
        except SilentNodeError:
            node = (await self.cluster.nodes()).get(name)
            if node is None or not node.is_alive:
                raise SilentNodeError(f"node {name} is gone", "try again") from None
            # One that runs and does not answer was started by another server.
            await self.cluster.end_node(name)
            self._learned = {known for known in self._learned if known[0] != name}
            await self.cluster.start_node(name, self.order(node))
            self._given_up.discard(name)
            await self.node(name).places()

    async def _give_back(self, watcher: str, node: str | None) -> None:
        """Give back what the cluster has reserved, and end the node server if that was the last of its node."""
        await self.slots.release(watcher)
        if node is None or node in self._standing(await self.books.read(), await self.slots.all()):
            return
        await self.cluster.end_node(node)

    async def _place(self, node: str) -> Place | None:
        """The place of a node server, under the node's name; None if it does not answer."""
        try:
            place = (await self.node(node).places())[LOCAL_NODE]
        except SupervisorError:
            return None
        return replace(place, node=node)


def _claimed_nodes(state: State) -> set[str]:
    return {entry.node for entry in state.components.values() if entry.holds and entry.node != LOCAL_NODE}


def _node(state: State, watcher: str) -> str | None:
    entry = state.components.get(watcher)
    return entry.node if entry is not None and entry.holds else None


def _unclaimed(place: Place, state: State, slots: Mapping[str, Slot]) -> Place:
    """The place with what no process of the books is claimed for: reserved there, or with the cluster alone."""
    if place.node == LOCAL_NODE:
        return place
    known = {
        name: Reservation(parse_watcher(name), place.node, slot.devices or ())
        for name, slot in slots.items()
        if slot.node == place.node
    } | {name: replace(one, node=place.node) for name, one in place.reservations.items()}
    claimed = {name for name, entry in state.components.items() if entry.holds}
    return replace(place, reservations={name: one for name, one in known.items() if name not in claimed})


def _as_counted(node: ClusterNode, kind: DeviceKind) -> Inventory:
    """The devices of a node without a node server, as far as the cluster counts them."""
    return Inventory(kind, tuple(Device(number, kind, f"{kind} {number}") for number in range(int(node.devices))))
