"""What the head's server has beside its own machine where the workers live on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import DynamoError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import MAIN, Watcher, endpoint_of, parse_watcher
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuators import Actuators, Reconciler
from dynamo_local.supervisor.actuator.changes import need_of
from dynamo_local.supervisor.node.head import NodeOrder, beat_apart, installed_versions
from dynamo_local.supervisor.places.capacity import NodeCapacity, device_count, kind_of
from dynamo_local.supervisor.places.cluster import ClusterNode, connect
from dynamo_local.supervisor.places.clustered import ClusterPlaces, Seen, Slots
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.local import Books, LocalPlaces
from dynamo_local.supervisor.places.node_servers import NodeServers
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.ownership import ClusterRecord, Ownership, owner_at
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from dynamo_local.tasks import TaskGuard, side_by_side
from state.statefile.model import Component

# Keeps the nodes of a cluster in order: ends node servers that hang, replaces workers that were lost with a node.

_LOOK_EVERY_S = 1.0
_LOOK_FOR_ROOM_EVERY_S = 0.25
"""While a worker that was lost is missing, for _SOON_S: a node that joins is counted at once."""

_SOON_S = 60.0
"""After a loss. Later a node that joins is seen by the next look: a large cluster is not asked so often for ever."""

_SILENT_LOOKS = 3
"""A node server that is silent at so many looks, of whose workers nothing is heard either, is ended by the cluster."""

_HEARD_SILENT_S = 60.0
"""So is one that is silent for so long although its workers are heard: it hangs, and no change of them comes to an
end."""

_RETRY_MAX_S = 30.0
"""Longest wait between two attempts to add a worker that was lost with its node, while no device comes."""


@dataclass
class NodeKeeper:
    """The keeper of the nodes of one server.

    `add`: adds workers, and waits until they are ready; raises SupervisorError. `reconcile`: releases what is lost or
    leaks of endpoints. `count_devices(seen)`: notes and returns how many devices the workers hold
    or may take. `role(service)`: the role in which its workers start. `endpoint_of`: the endpoint whose worker has that
    name. `replaces`: whether lost workers are added anew,
    as they are where no planner decides. `clock`: seconds.
    """

    places: ClusterPlaces
    add: Callable[[Sequence[AddWorker]], Awaitable[None]]
    reconcile: Callable[[Collection[str]], Awaitable[None]]
    count_devices: Callable[[Seen], Awaitable[float]]
    role: Callable[[str], str]
    endpoint_of: Callable[[Watcher], str]
    replaces: bool
    report: Report
    clock: Callable[[], float] = time.monotonic
    _silent: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    """Nodes that are silent: at how many looks, and since when."""
    _lost: dict[str, AddWorker] = field(default_factory=dict, init=False)
    """Workers that were lost with their nodes, and whose claims are to be released."""
    _missing: list[AddWorker] = field(default_factory=list, init=False)
    """Workers that were lost with their nodes, and for which there is no place yet."""
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    """By service, the workers that there are to be beside those that are missing."""
    _gone: frozenset[str] = field(default=frozenset(), init=False)
    """Workers that were lost at the last look."""
    _seen: dict[str, Component] = field(default_factory=dict, init=False)
    """The workers that there were at the last look."""
    _adding: str | None = field(default=None, init=False)
    """The service of which a worker is being added."""
    _devices: float = field(default=0.0, init=False)
    _soon_until: float = field(default=-math.inf, init=False)
    _tried_at: float = field(default=-math.inf, init=False)
    _delay_s: float = field(default=0.0, init=False)

    async def keep(self) -> None:
        """Find reservations and processes that were lost, until cancelled."""
        await self._repeat(self.look, _LOOK_EVERY_S, "the nodes are not in order", lambda: True)

    async def keep_replacing(self) -> None:
        """Add the workers that are missing, until cancelled. Beside `keep`: a worker may start for minutes."""
        what = "a worker that was lost is not replaced"
        await self._repeat(self.replace, _LOOK_FOR_ROOM_EVERY_S, what, lambda: not self._missing)

    async def _repeat(
        self, work: Callable[[], Awaitable[None]], every_s: float, what: str, is_over: Callable[[], bool]
    ) -> None:
        """Do the work again and again. Its failures are reported as `what`, until it succeeds and they are over."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(every_s)
            try:
                await work()
            except DynamoError as error:
                failure.note(f"{what} for now: {error}")
            else:
                if is_over():
                    failure.note("")

    async def look(self) -> None:
        """Look once. Raises SupervisorError if something cannot be put in order; the next look tries again."""
        places, seen = self.places, await self.places.seen()
        await self._count_devices(seen)
        # At the same time, as the books may change while a silent node is waited for.
        silent, lost = await asyncio.gather(places.silent(seen), places.lost(seen))
        for node in (hanging := self._hanging(silent)):
            self.report.step(f"node {node} does not answer: its node server is ended")
            await places.give_up(node)
        if hanging:
            lost = await places.lost(await places.seen())
        entries = (await places.books.read()).components
        # Not those that somebody has changed since, as who removes a worker does: the cluster may take long to answer.
        still = [one for one in lost if _is_unchanged(one, entries.get(one.watcher_name))]
        lost = (*still, *await self._released_already(entries))
        # Workers of other endpoints are replaced by the controller of these.
        own = [entry for entry in lost if endpoint_of(entry.revision) == MAIN]
        self._heed_orders({name: one for name, one in entries.items() if endpoint_of(one.revision) == MAIN}, own)
        if self.replaces:
            self._lost |= {one.watcher_name: AddWorker(self.role(one.component), one.component) for one in own}
        try:
            names = {entry.watcher_name for entry in lost} | await places.leaks()
            if names:
                await self.reconcile({self.endpoint_of(parse_watcher(name)) for name in names})
        finally:
            # What is left on one node keeps nobody from replacing what was lost with another.
            await self._note_missing()

    async def replace(self) -> None:
        """Add the workers that are missing, at once when there are more devices, else less and less often. Raises
        SupervisorError if that fails, as it does while there is no room."""
        if self._missing and self.clock() < self._soon_until:
            await self._count_devices(await self.places.seen())
        while self._missing and self.clock() >= self._tried_at + self._delay_s:
            self._tried_at = self.clock()
            self._delay_s = min(_RETRY_MAX_S, max(_LOOK_EVERY_S, 2 * self._delay_s))
            change = self._missing[0]
            self._adding = change.component
            try:
                await self.add([change])
                self._missing.remove(change)
                self._count(change.component, 1)
            finally:
                self._adding = None
            self._delay_s = 0.0

    async def _count_devices(self, seen: Seen) -> None:
        self._devices, before = await self.count_devices(seen), self._devices
        if self._devices > before:
            self._delay_s = 0.0

    async def _released_already(self, entries: Mapping[str, Component]) -> list[Component]:
        """The workers that were not lost at the last look, whose claims were released since, and whose nodes are gone:
        whoever makes a change releases what is lost by then."""
        before, self._seen = self._seen, {name: entry for name, entry in entries.items() if _stays(entry)}
        there = {name for name, entry in entries.items() if entry.holds}
        dropped = [entry for name, entry in before.items() if name not in there | self._gone]
        return [entry for entry in dropped if await self.places.is_gone(entry.node)]

    def _heed_orders(self, entries: Mapping[str, Component], lost: Sequence[Component]) -> None:
        """Forget what is missing of a service whose workers have become more or fewer since the last look, other than
        by a loss or by `replace`: who changed their number meant what there is to be."""
        names = frozenset(entry.watcher_name for entry in lost)
        there = Counter(entry.component for name, entry in entries.items() if name not in names and _stays(entry))
        for entry in lost:
            if entry.watcher_name not in self._gone:
                self._count(entry.component, -1)
        self._gone = names
        for service in {change.component or "" for change in self._missing} - {self._adding}:
            if self._counts.get(service, there[service]) != there[service]:
                self._missing = [change for change in self._missing if change.component != service]
                self.report.step(f"{service}: workers that were lost are not replaced, as their number was changed")
        self._counts = dict(there) | {one: n for one, n in self._counts.items() if one == self._adding}

    def _count(self, service: str | None, more: int) -> None:
        if service in self._counts:
            self._counts[service] += more

    def _hanging(self, silent: Mapping[str, bool]) -> list[str]:
        """The nodes that are silent for too long, of those that are silent at this look, each with whether a worker is
        heard."""
        now = self.clock()
        known = {node: self._silent.get(node, (0, now)) for node in silent}
        self._silent = {node: (looks + 1, since) for node, (looks, since) in known.items()}
        return [
            node
            for node, (looks, since) in self._silent.items()
            if (now - since >= _HEARD_SILENT_S if silent[node] else looks >= _SILENT_LOOKS)
        ]

    async def _note_missing(self) -> None:
        """Count as missing those that were lost and are released by now."""
        if not self._lost:
            return
        entries = (await self.places.books.read()).components
        still = {one.watcher_name for one in await self.places.lost(await self.places.seen())}
        for name in [name for name in self._lost if name not in still]:
            change = self._lost.pop(name)
            if name not in entries or not entries[name].holds:
                self._missing.append(change)
                self._soon_until = self.clock() + _SOON_S
                # What became of the others until now is no later order.
                self._counts.pop(change.component or "", None)


def _is_unchanged(before: Component, entry: Component | None) -> bool:
    return entry is not None and (entry.holds, entry.phase) == (before.holds, before.phase)


def _stays(entry: Component) -> bool:
    """Whether a worker is among those that there are to be, and neither on its way in nor out."""
    return entry.holds and entry.phase in (None, "restarting")


_ANSWERS_WITHIN_S = 2.0
"""For a question to a node. Whoever asks the head for all nodes waits longer."""

_HURRIED_S = 5.0
"""For what is under way when the nodes are not to be waited for any more."""

_PLANNER_ROLE = "planner"
_NO_OPERATION = "no-operation"


class ServerNodes:
    """The nodes of one server."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery, launch = machinery, machinery.launch
        self._id = secrets.token_hex(8)
        namespace, mine = launch.graph.namespace, owner_at(launch.paths.root)
        self._ownership = Ownership(namespace, mine, machinery.report, where="in this cluster")
        self._kept = TaskGuard()
        """What goes on while the server drains."""
        self._beats: asyncio.Task[None] | None = None
        self._is_left = False
        self._kind = launch.inventory.kind
        """Of the nodes' devices."""
        self._slots: Slots | None = None
        self.places: ClusterPlaces | None = None
        """The places of the head and of all nodes. None until `start`."""
        self.capacity: Mapping[str, NodeCapacity] = {}
        """The devices of the nodes that live, as of a second ago."""
        self.given_up: dict[str, str] = {}
        """Workers of endpoints that a node does not start again, each with the reason."""

    async def connect(self, stack: AsyncExitStack, hurry: asyncio.Event) -> None:
        """Connect to the cluster, own the namespace there, and clear what a server of it that has crashed has left.

        Raises NamespaceBusyError if another server owns it, UsageError, SupervisorError.
        """
        launch = self._machinery.launch
        cluster = await connect(launch.environment, launch.graph.namespace, launch.cluster_address)
        stack.push_async_callback(cluster.close)
        record = ClusterRecord(cluster)
        await self._ownership.confirm(record)
        stack.push_async_callback(self._let_go, record)
        self._kept.spawn("ownership", self._ownership.keep(record))
        self._machinery.tasks.spawn("ownership in the cluster", self._kept.failed())
        self._slots = Slots(cluster, launch.graph.namespace)
        await self._slots.clear()
        self._kind = kind_of((await cluster.nodes()).values(), launch.inventory.kind)
        stack.push_async_callback(self.end, hurry)

    async def start(self, bus: Bus, address: BusAddress, watch: FleetWatch, here: LocalPlaces) -> ClusterPlaces:
        """Follow the fleet and the nodes, and return all places. `address`: of the bus, for the nodes. `here`: this
        machine."""
        assert self._slots is not None, "connect first"
        machinery, launch = self._machinery, self._machinery.launch
        books, subjects = Books(machinery.store), Subjects(launch.graph.namespace)
        servers = NodeServers(
            self._slots.cluster,
            node=lambda name: FarPlaces(bus, subjects.node(name), f"node {name}", _ANSWERS_WITHIN_S),
            order=lambda node: self._order(node, address),
            graph=lambda revision: launch.paths.graph_of(revision).read_bytes(),
        )
        self.places = places = ClusterPlaces(
            *(servers, self._slots, books, here),
            heard=lambda: {presence.watcher for presence in watch.view.members()},
            kind=self._kind,
        )
        kinds = replace(launch.inventory, kind=self._kind)
        await asyncio.to_thread(machinery.blueprint.change, lambda before: replace(before, inventory=kinds))
        await self._count_devices(await places.seen())
        self._beats = self._kept.spawn("beats", beat_apart(address, subjects, self._id))
        return places

    async def add_first_workers(self, actuators: Actuators, reconciler: Reconciler) -> None:
        """Add the workers that the graph has at the start, side by side, and keep nodes and reservations in order.

        Raises SupervisorError if one of them does not become ready.
        """
        assert self.places is not None, "start first"
        workers = [template for template in self._machinery.launch.templates if template.role in ENGINE_ROLES]
        namespace = self._machinery.launch.graph.namespace
        await self.places.prepare(
            {one.watcher(namespace, index): need_of(one) for one in workers for index in range(one.workers)}
        )
        add = partial(self._add, actuators)

        async def reconcile(endpoints: Collection[str]) -> None:
            await side_by_side(map(reconciler.reconcile, sorted(endpoints)))

        keeper = NodeKeeper(
            *(self.places, add, reconcile, self._count_devices, self._role, self._endpoint_of),
            replaces=not self._is_planned,
            report=self._machinery.report,
        )
        # While workers are awaited as well: one of them may be on a node that dies.
        self._machinery.tasks.spawn("nodes", keeper.keep())
        await add([AddWorker(one.role, one.service) for one in workers for _ in range(one.workers)])
        self._machinery.tasks.spawn("replacements", keeper.keep_replacing())

    async def end(self, hurry: asyncio.Event) -> None:
        """End all node servers, and give back what is reserved. Harmless if that was done or has failed. A failure is
        only reported: a node server that hears nothing of its head ends by itself. `hurry`, once set, cuts it short."""
        if self._is_left:
            return
        self._is_left = True
        ending, hurried = asyncio.create_task(self._end_all()), asyncio.create_task(hurry.wait())
        await asyncio.wait({ending, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        await asyncio.wait({ending}, timeout=_HURRIED_S)
        if not ending.done():
            ending.cancel()
            self._machinery.report.step("the nodes are not waited for: their servers end when they hear nothing")
        with suppress(asyncio.CancelledError):
            await ending
        if self._beats is not None:
            # Before a NATS server of our own ends.
            self._beats.cancel()
            await asyncio.wait({self._beats})

    async def _end_all(self) -> None:
        assert self._slots is not None
        try:
            await self._ownership.confirm(ClusterRecord(self._slots.cluster))
            if self.places is None:
                await self._slots.clear()
            else:
                await self.places.end_all()
        except DynamoError as error:
            self._machinery.report.step(f"the nodes could not be left in order: {error}")

    async def _let_go(self, record: ClusterRecord) -> None:
        """Let another server have the namespace in the cluster."""
        await self._kept.close()
        try:
            await self._ownership.release(record)
        except DynamoError as error:
            self._machinery.report.step(f"the next server elsewhere in the cluster will wait for this one: {error}")

    def _order(self, node: ClusterNode, address: BusAddress) -> bytes:
        is_cpu = self._kind == "cpu-slot"
        return NodeOrder(
            self._machinery.launch.graph.namespace,
            node.node,
            self._id,
            address,
            self._machinery.launch.graph,
            installed_versions(),
            max(1, int(node.devices)) if is_cpu else None,
            self._machinery.settings.ready_deadline_s,
            self._machinery.settings.drain_deadline_s,
        ).encode()

    async def _add(self, actuators: Actuators, changes: Sequence[AddWorker]) -> None:
        """Raises SupervisorError for the first worker that could not be added."""
        actuator = await actuators.of(MAIN, self._machinery.report)
        for outcome in await actuator.apply_all(changes, DeviceLimits()):
            if not outcome.done:
                raise SupervisorError(outcome.note, "see `dynamo events`, and `dynamo logs` of that worker")

    async def _count_devices(self, seen: Seen) -> float:
        """Write down how many devices the workers hold or may take, and what else the nodes say. Returns their
        number."""
        assert self.places is not None
        self.capacity, blueprint = self.places.capacity(seen), self._machinery.blueprint
        self.given_up.clear()
        self.given_up.update(self.places.given_up)
        total = device_count(self.capacity.values())
        after = await asyncio.to_thread(blueprint.change, lambda before: replace(before, cluster_devices=total))
        return after.device_count

    @property
    def _is_planned(self) -> bool:
        """Whether a planner decides how many workers there are to be. For those of endpoints the server does."""
        planners = (service for service in self._machinery.launch.graph.services if service.role == _PLANNER_ROLE)
        return any(service.config.get(_NO_OPERATION) is False for service in planners)

    def _endpoint_of(self, watcher: Watcher) -> str:
        return self._machinery.blueprint.current().endpoint_of(watcher)

    def _role(self, service: str) -> str:
        return next(template.role for template in self._machinery.launch.templates if template.service == service)
