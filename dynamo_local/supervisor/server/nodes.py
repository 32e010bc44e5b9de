"""What the head's server has beside its own machine where the workers live on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from msgspec.structs import replace

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import DynamoError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuators import Actuators, Reconciler
from dynamo_local.supervisor.actuator.changes import need_of
from dynamo_local.supervisor.node.head import NodeOrder, beat_apart, installed_versions
from dynamo_local.supervisor.places.capacity import NodeCapacity, device_count, kind_of
from dynamo_local.supervisor.places.cluster import ClusterNode, ClusterRecord
from dynamo_local.supervisor.places.clustered import ClusterPlaces, Seen, Slots
from dynamo_local.supervisor.places.environments import connect
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.local import Books, LocalPlaces
from dynamo_local.supervisor.server.launch.launch import Launch
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.node_keeper import NodeKeeper
from dynamo_local.supervisor.server.ownership import Ownership, owner_at
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.settings import ServerSettings
from dynamo_local.tasks import TaskGuard, side_by_side

_ANSWERS_WITHIN_S = 2.0
"""For a question to a node. Whoever asks the head for all nodes waits longer."""

_HURRIED_S = 5.0
"""For what is under way when the nodes are not to be waited for any more."""

_PLANNER_ROLE = "planner"
_NO_OPERATION = "no-operation"


class ServerNodes:
    """The nodes of one server. `tasks`: take its background tasks."""

    def __init__(
        self, launch: Launch, settings: ServerSettings, machinery: Machinery, report: Report, tasks: TaskGuard
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._machinery = machinery
        self._report = report
        self._tasks = tasks
        self._id = secrets.token_hex(8)
        namespace, mine = launch.graph.namespace, owner_at(launch.paths.root)
        self._ownership = Ownership(namespace, mine, report, where="in this cluster")
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
        launch = self._launch
        cluster = await connect(launch.environment, launch.graph.namespace, launch.cluster_address)
        stack.push_async_callback(cluster.close)
        record = ClusterRecord(cluster)
        await self._ownership.confirm(record)
        stack.push_async_callback(self._let_go, record)
        self._kept.spawn("ownership", self._ownership.keep(record))
        self._tasks.spawn("ownership in the cluster", self._kept.failed())
        self._slots = Slots(cluster, launch.graph.namespace)
        await self._slots.clear()
        self._kind = kind_of((await cluster.nodes()).values(), launch.inventory.kind)
        stack.push_async_callback(self.end, hurry)

    async def start(self, bus: Bus, address: BusAddress, watch: FleetWatch, here: LocalPlaces) -> ClusterPlaces:
        """Follow the fleet and the nodes, and return all places. `address`: of the bus, for the nodes. `here`: this
        machine."""
        assert self._slots is not None, "connect first"
        machinery, launch = self._machinery, self._launch
        books, subjects = Books(machinery.store), Subjects(launch.graph.namespace)
        self.places = places = ClusterPlaces(
            self._slots.cluster,
            self._slots,
            books,
            here,
            node=lambda name: FarPlaces(bus, subjects.node(name), f"node {name}", _ANSWERS_WITHIN_S),
            order=lambda node: self._order(node, address),
            graph=lambda revision: launch.paths.graph_of(revision).read_bytes(),
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
        workers = [template for template in self._launch.templates if template.role in ENGINE_ROLES]
        namespace = self._launch.graph.namespace
        await self.places.prepare(
            {one.watcher(namespace, index): need_of(one) for one in workers for index in range(one.workers)}
        )
        add = partial(self._add, actuators)

        async def reconcile(endpoints: Collection[str]) -> None:
            await side_by_side(map(reconciler.reconcile, sorted(endpoints)))

        keeper = NodeKeeper(
            *(self.places, add, reconcile, self._count_devices, self._role),
            replaces=not self._is_planned,
            report=self._report,
        )
        # While workers are awaited as well: one of them may be on a node that dies.
        self._tasks.spawn("nodes", keeper.keep())
        await add([AddWorker(one.role, one.service) for one in workers for _ in range(one.workers)])
        self._tasks.spawn("replacements", keeper.keep_replacing())

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
            self._report.step("the nodes are not waited for: their servers end when they hear nothing")
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
            self._report.step(f"the nodes could not be left in order: {error}")

    async def _let_go(self, record: ClusterRecord) -> None:
        """Let another server have the namespace in the cluster."""
        await self._kept.close()
        try:
            await self._ownership.release(record)
        except DynamoError as error:
            self._report.step(f"the next server elsewhere in the cluster will wait for this one: {error}")

    def _order(self, node: ClusterNode, address: BusAddress) -> bytes:
        is_cpu = self._kind == "cpu-slot"
        return NodeOrder(
            self._launch.graph.namespace,
            node.node,
            self._id,
            address,
            self._launch.graph,
            installed_versions(),
            max(1, int(node.devices)) if is_cpu else None,
            self._settings.ready_deadline_s,
            self._settings.drain_deadline_s,
        ).encode()

    async def _add(self, actuators: Actuators, changes: Sequence[AddWorker]) -> None:
        """Raises SupervisorError for the first worker that could not be added."""
        actuator = await actuators.of("", self._report)
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
        planners = (service for service in self._launch.graph.services if service.role == _PLANNER_ROLE)
        return any(service.config.get(_NO_OPERATION) is False for service in planners)

    def _role(self, service: str) -> str:
        return next(template.role for template in self._launch.templates if template.service == service)
