"""The places of a graph whose workers live on the nodes of a cluster (cluster.py). In the head's server.

Each worker's devices are reserved with the cluster first, under the name NAMESPACE/WATCHER, then with the node server
of the node that the cluster has chosen; and backwards. A node server stands only where something is reserved. The
graph's other processes live on the head's machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from dynamo_local.core.errors import DeviceError, DynamoError, SilentNodeError, StateError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import LOCAL_NODE, Watcher
from dynamo_local.core.shares import held
from dynamo_local.supervisor.places.capacity import NodeCapacity, capacity_of_nodes
from dynamo_local.supervisor.places.cluster import Cluster, ClusterNode
from dynamo_local.supervisor.places.local import Books
from dynamo_local.supervisor.places.node_servers import NodeServers
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Places, Slot, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import finish, side_by_side
from state.devices.allocation import Device, DeviceKind, Inventory
from state.statefile.model import Component, State

# What a graph has reserved with its cluster, by watcher. Only the head's server changes it, and nodes that die do.

_KNOWN_S = 1.0
"""While a worker starts, its status is asked for several times a second, and the cluster may take long to answer."""

_SETTLES_S = 1.0
"""For the cluster's count of what is free to show what was given back. Ray takes some tenths of a second."""


@dataclass
class Slots:
    """The reservations of one namespace, each under the name NAMESPACE/WATCHER."""

    cluster: Cluster
    namespace: str
    clock: Callable[[], float] = time.monotonic
    _known: tuple[float, Mapping[str, Slot]] = field(default=(-math.inf, {}), init=False)
    _amounts: dict[str, float] = field(default_factory=dict, init=False)
    """Devices, or the share of one, that are reserved for each watcher, or are about to be."""
    _nodes: dict[str, str] = field(default_factory=dict, init=False)
    """The node on which something was reserved for each watcher."""
    _given_back: dict[str, tuple[float, str, float]] = field(default_factory=dict, init=False)
    """When something was given back for a watcher, on which node, and how much."""

    async def all(self) -> Mapping[str, Slot]:
        """What is reserved, as of _KNOWN_S ago at most."""
        known, now = self._known, self.clock()
        if now - known[0] < _KNOWN_S:
            return known[1]
        found = await self.cluster.reservations()
        prefix = f"{self.namespace}/"
        slots = {name.removeprefix(prefix): slot for name, slot in found.items() if name.startswith(prefix)}
        if self._known is known:
            # Nothing was reserved or given back meanwhile.
            self._known = (now, slots)
        return slots

    async def reserve(self, watcher: Watcher, need: Need, avoid: Collection[str] = ()) -> Slot:
        """Reserve with the cluster (cluster.Cluster). Raises DeviceError, which says for whom."""
        # Before it is there: somebody may count meanwhile.
        name, amount = str(watcher), held(need.devices, need.share)
        self._amounts.setdefault(name, amount)
        try:
            slot = await self.cluster.reserve(self._name(name), need, avoid)
            self._nodes[name] = slot.node
            return slot
        except DeviceError as error:
            self._amounts.pop(name, None)
            needed = f"{need.devices} device{'' if need.devices == 1 else 's'}"
            raise DeviceError(f"{watcher.service} needs {needed}: {error.cause}", error.remedy) from error
        finally:
            self._forget()

    async def release(self, watcher: str) -> None:
        """Give back what is reserved for the watcher. Harmless if there is nothing."""
        try:
            await self.cluster.release(self._name(watcher))
        finally:
            self._forget()
        amount, node = self._amounts.pop(watcher, 0.0), self._nodes.pop(watcher, None)
        if node is not None:
            self._given_back[watcher] = self.clock(), node, amount

    def unclaimed(self, claimed: Collection[str], slots: Mapping[str, Slot]) -> list[tuple[str, float]]:
        """Nodes and amounts of those of the slots whose watchers are not claimed, yet or any more, and of what was
        given back just now: others hold none of it, although the cluster does not count it as free."""
        now = self.clock()
        self._given_back = {name: one for name, one in self._given_back.items() if now - one[0] < _SETTLES_S}
        found = [(slot.node, self._amounts.get(name, 0.0)) for name, slot in slots.items() if name not in claimed]
        settling = [(node, amount) for name, (_, node, amount) in self._given_back.items() if name not in slots]
        return found + settling

    async def clear(self, nodes: Collection[str] = ()) -> None:
        """Release all that is reserved, and end the node servers there and on those `nodes`. Tries all, then raises the
        first error."""
        self._forget()
        ending = asyncio.gather(*map(self.cluster.end_node, nodes), return_exceptions=True)
        slots: Mapping[str, Slot] = {}
        failures: list[BaseException | None] = []
        try:
            slots = await self.all()
        except SupervisorError as error:
            failures.append(error)
        others = {slot.node for slot in slots.values()}.difference(nodes)
        failures += await ending
        failures += await asyncio.gather(*map(self.cluster.end_node, others), return_exceptions=True)
        failures += await asyncio.gather(*map(self.release, slots), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    def _forget(self) -> None:
        """Have the cluster asked anew, also by whoever is asking at the moment."""
        self._known = (-math.inf, {})

    def _name(self, watcher: str) -> str:
        return f"{self.namespace}/{watcher}"


class Seen(NamedTuple):
    """The books, the nodes, and what is reserved, in this order: read once for all that one look needs."""

    state: State
    nodes: Mapping[str, ClusterNode]
    slots: Mapping[str, Slot]


@dataclass
class ClusterPlaces:
    """Places on the nodes of a cluster, and the head's own machine (port.Places).

    `slots`: what is reserved with it. `local`: places of the head. `heard`: gives the watchers that have a presence on
    the bus. `kind`: of the cluster's devices.
    """

    servers: NodeServers
    slots: Slots
    books: Books
    local: Places
    heard: Callable[[], Set[str]]
    kind: DeviceKind
    given_up: Mapping[str, str] = field(default_factory=dict, init=False)
    """Watchers of endpoints' workers that are not started again, each with the reason, as of the last `silent`."""
    _silent: frozenset[str] = field(default=frozenset(), init=False)
    """Nodes that did not answer at the last `silent`."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a reservation is made or given back: a node server ends with the last one, and starts with the
    first."""
    _prepared: set[str] = field(default_factory=set, init=False)
    """Watchers for which `reserve` is to follow: no leaks."""

    async def places(self) -> Mapping[str, Place]:
        state, nodes, slots = await self.seen()
        found = dict(await self.local.places())
        asked = self._asked(nodes, state, slots)
        found |= await self.servers.places(asked)
        others = [node for name, node in nodes.items() if node.is_alive and name not in asked]
        found |= {node.node: Place(node.node, _as_counted(node, self.kind)) for node in others}
        unprepared = {name: slot for name, slot in slots.items() if name not in self._prepared}
        return {name: _unclaimed(place, state, unprepared) for name, place in found.items()}

    async def reserve(self, watcher: Watcher, need: Need) -> Slot:
        if need.role not in ENGINE_ROLES:
            return await self.local.reserve(watcher, need)
        async with self._changing:
            name = str(watcher)
            entry = (await self.books.read()).components.get(name)
            if entry is not None and entry.holds:
                raise StateError(f"{name} has a reservation already", "release it first")
            is_new = name not in await self.slots.all()
            self._prepared.discard(name)
            slot = await self._slot(watcher, need)
            try:
                await self.servers.have(slot.node, self._is_any_heard)
            except DynamoError:
                if is_new:
                    await self._give_back(name, slot.node)
                raise
            try:
                there = self.servers.node(slot.node)
                reserved = await there.reserve(watcher, replace(need, on=slot.devices or (), node=""))
            except DynamoError:
                if is_new:
                    await self._undo_reserve(name, slot.node)
                raise
            return replace(reserved, node=slot.node)

    async def prepare(self, needs: Mapping[Watcher, Need]) -> None:
        """Reserve for several watchers with the cluster, and start the node servers at the same time. `reserve` is to
        follow for each. What was reserved when this raises is left."""
        async with self._changing:
            self._prepared |= {str(watcher) for watcher in needs}
            slots = [await self._slot(watcher, need) for watcher, need in needs.items()]
            nodes = sorted({slot.node for slot in slots})
            await side_by_side(self.servers.have(node, self._is_any_heard) for node in nodes)

    async def start(self, plan: WatcherPlan) -> None:
        if plan.node == LOCAL_NODE:
            await self.local.start(plan)
            return
        entry = (await self.books.read()).components.get(plan.name)
        if plan.name not in await self.slots.all():
            raise SupervisorError(f"{plan.name} has not reserved {list(plan.devices)}", "reserve them first")
        if plan.revision:
            await self.servers.learn(plan.node, plan.revision)
        # The node plans command and environment by its own paths. A process that replaces another keeps its role.
        role = plan.role if entry is None else entry.role
        order = replace(plan, node=LOCAL_NODE, role=role, argv=(), environment={})
        await self.servers.node(plan.node).start(order)

    async def end(self, watcher: str, deadline_s: float) -> None:
        node = await self._node_of(watcher)
        if node is None or await self._is_lost(node, watcher):
            return
        if node != LOCAL_NODE:
            # One that hangs would be waited for as long as its worker may take.
            await self.servers.check_answers(node)
        await (self.local if node == LOCAL_NODE else self.servers.node(node)).end(watcher, deadline_s)

    async def release(self, watcher: str) -> None:
        node = await self._node_of(watcher)
        if node == LOCAL_NODE:
            await self.local.release(watcher)
            return
        async with self._changing:
            if node is not None and not await self._is_lost(node, watcher):
                await self.servers.check_answers(node)
                await self.servers.node(node).release(watcher)
            # Not half of it: nobody would end a node server on which nothing is reserved any more.
            await finish(self._give_back(watcher, node))

    async def statuses(self) -> Mapping[str, Status]:
        return await self._statuses(await self.seen())

    async def _statuses(self, seen: Seen) -> Mapping[str, Status]:
        state, nodes, slots = seen
        local = await self.local.statuses()
        here = {name: c for name, c in local.items() if name not in slots and _node(state, name) in (None, LOCAL_NODE)}
        found: dict[str, Status] = dict(here)
        # Those that the cluster has declared dead are not waited for.
        asked = self._asked(nodes, state, slots)
        answers, heard = await self.servers.statuses(asked), self.heard()
        for node in self._standing(state, slots):
            told = answers.get(node)
            if told is None:
                mine = _claimed_on(state, node)
                told = {name: "unknown" for name in mine if node in asked or name in heard}
            found |= told
        return found

    async def last_error(self, watcher: str) -> str | None:
        places = await self._places_of(watcher)
        try:
            return None if places is None else await places.last_error(watcher)
        except SilentNodeError:
            return None

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        node = await self._node_of(watcher)
        if node is None:
            return LogPart((), after or 0)
        if node in self._silent:
            # Whoever follows logs asks for all of them again and again.
            raise SilentNodeError(f"node {node} does not answer", "what runs there is unknown until it does")
        return await self._places_at(node).log(watcher, lines, after)

    async def give_up(self, node: str) -> None:
        """Have the cluster end a node server that does not answer: nothing of it runs then. Raises SupervisorError."""
        async with self._changing:
            await self.servers.give_up(node)
            # Another node server may run there.
            self._silent -= {node}

    async def end_all(self) -> None:
        """End all node servers, and give back all that is reserved. Raises SupervisorError if that fails somewhere."""
        async with self._changing:
            claimed = _claimed_nodes(await self.books.read())
            await self.slots.clear(claimed)

    async def lost(self, seen: Seen) -> tuple[Component, ...]:
        """The claims on nodes whose processes are gone, and of which no change is under way, or one that cannot go on:
        a restart on a node that is dead."""
        statuses = await self._statuses(seen)
        far = (entry for entry in seen.state.components.values() if entry.holds and entry.node != LOCAL_NODE)
        gone = (entry for entry in far if entry.watcher_name not in statuses)
        return tuple(
            entry
            for entry in gone
            if entry.phase is None or (entry.phase == "restarting" and not self.servers.may_run(seen.nodes, entry.node))
        )

    async def silent(self, seen: Seen) -> Mapping[str, bool]:
        """The nodes that the cluster takes for alive and that do not answer, each with whether one of its processes is
        heard; without those whose node server is just starting. The others say which workers they have given up."""
        state, nodes, slots = seen
        asked = self._asked(nodes, state, slots)
        answers = await self.servers.places(asked)
        told = {name: why for place in answers.values() for name, why in place.given_up.items()}
        unknown = {name: why for name, why in self.given_up.items() if _node(state, name) in asked - answers.keys()}
        self.given_up = unknown | told
        self._silent, heard = frozenset(asked - answers.keys() - self.servers.starting), self.heard()
        return {node: not heard.isdisjoint(_claimed_on(state, node)) for node in self._silent}

    def capacity(self, seen: Seen) -> Mapping[str, NodeCapacity]:
        """The devices of the nodes that live, by node."""
        state, nodes, slots = seen
        claimed = {name for name, entry in state.components.items() if entry.holds}
        # Claimed last, and released first in the books: what the cluster has of ours beside them is not held by others.
        return capacity_of_nodes(nodes, state, self.slots.unclaimed(claimed, slots), self.servers.failed)

    async def leaks(self) -> frozenset[str]:
        """Watchers for which the cluster has reserved something, and that the books do not know."""
        state = await self.books.read()
        unclaimed = frozenset(name for name in await self.slots.all() if _node(state, name) is None)
        return unclaimed - self._prepared

    async def _slot(self, watcher: Watcher, need: Need) -> Slot:
        """Reserve with the cluster, on nodes that answer first."""
        slot = await self.slots.reserve(watcher, need, self._silent | self.servers.failed)
        if need.node not in ("", slot.node):
            # Left of another change, and released by the next look.
            raise DeviceError(f"{watcher} has a reservation on node {slot.node}, and is to live on {need.node}")
        return slot

    # What the cluster has, and the nodes of watchers.

    async def seen(self) -> Seen:
        """What there is now. Raises SupervisorError."""
        return Seen(await self.books.read(), await self.slots.cluster.nodes(), await self.slots.all())

    def _standing(self, state: State, slots: Mapping[str, Slot]) -> set[str]:
        """The nodes on which something of the graph is, or may be."""
        return _claimed_nodes(state) | {slot.node for slot in slots.values()}

    async def _node_of(self, watcher: str) -> str | None:
        """The node of a watcher, by the books or else by its reservation, which a node server may have without the
        cluster; None if nobody knows it."""
        state, slots = await self.books.read(), await self.slots.all()
        node = _node(state, watcher)
        if node is not None:
            return node
        if watcher in slots:
            return slots[watcher].node
        if (await self.local.statuses()).get(watcher, "unknown") != "unknown":
            return LOCAL_NODE
        found = await self.servers.places(self._asked(await self.slots.cluster.nodes(), state, slots))
        return next((place.node for place in found.values() if watcher in place.reserved), None)

    async def _places_of(self, watcher: str) -> Places | None:
        node = await self._node_of(watcher)
        return None if node is None else self._places_at(node)

    def _places_at(self, node: str) -> Places:
        return self.local if node == LOCAL_NODE else self.servers.node(node)

    async def is_gone(self, node: str) -> bool:
        """Whether the cluster has declared a node dead, or has ended a node server there that did not answer."""
        return node != LOCAL_NODE and not self.servers.may_run(await self.slots.cluster.nodes(), node)

    async def _is_lost(self, node: str, watcher: str) -> bool:
        """Whether a node is gone and nothing is heard of the watcher: what it held is free."""
        return watcher not in self.heard() and await self.is_gone(node)

    async def _is_any_heard(self, node: str) -> bool:
        return not self.heard().isdisjoint(_claimed_on(await self.books.read(), node))

    def _asked(self, nodes: Mapping[str, ClusterNode], state: State, slots: Mapping[str, Slot]) -> set[str]:
        """The nodes on which a node server is to answer."""
        return {node for node in self._standing(state, slots) if self.servers.may_run(nodes, node)}

    async def _undo_reserve(self, watcher: str, node: str) -> None:
        """Give back what a node server may have reserved, though no answer said so. If it does not answer now either,
        the slot is kept: it is a leak, which is released once the node answers or is dead."""
        with suppress(DynamoError):
            await self.servers.check_answers(node)
            await self.servers.node(node).release(watcher)
            await self._give_back(watcher, node)

    async def _give_back(self, watcher: str, node: str | None) -> None:
        """Give back what the cluster has reserved, and end the node server if that was the last of its node."""
        await self.slots.release(watcher)
        if node is None or node in self._standing(await self.books.read(), await self.slots.all()):
            return
        await self.servers.end(node)


def _claimed_nodes(state: State) -> set[str]:
    return {entry.node for entry in state.components.values() if entry.holds and entry.node != LOCAL_NODE}


def _claimed_on(state: State, node: str) -> list[str]:
    return [name for name, entry in state.components.items() if entry.node == node and entry.holds]


def _node(state: State, watcher: str) -> str | None:
    entry = state.components.get(watcher)
    return entry.node if entry is not None and entry.holds else None


def _unclaimed(place: Place, state: State, slots: Mapping[str, Slot]) -> Place:
    """The place with what no process of the books is claimed for: reserved there, or with the cluster alone."""
    if place.node == LOCAL_NODE:
        return place
    known = place.reserved | {name for name, slot in slots.items() if slot.node == place.node}
    claimed = {name for name, entry in state.components.items() if entry.holds}
    return replace(place, reserved=known - claimed)


def _as_counted(node: ClusterNode, kind: DeviceKind) -> Inventory:
    """The devices of a node without a node server, as far as the cluster counts them."""
    return Inventory(kind, tuple(Device(number, kind, f"{kind} {number}") for number in range(int(node.devices))))
