"""What the head's server has beside its own machine where the workers live on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from msgspec.structs import replace

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import DynamoError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.add import need_of
from dynamo_local.supervisor.actuator.local import open_actuator
from dynamo_local.supervisor.node.order import NodeOrder, installed_versions
from dynamo_local.supervisor.node.silence import beat_apart
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.cluster import Cluster, ClusterNode, ClusterRecord
from dynamo_local.supervisor.places.clustered import ClusterPlaces
from dynamo_local.supervisor.places.environments import connect
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.machine import CircusWatchers, MachineDevices
from dynamo_local.supervisor.places.mirror import PresenceMirror
from dynamo_local.supervisor.places.service import PlacesService
from dynamo_local.supervisor.places.slots import Slots
from dynamo_local.supervisor.server.launch.prepare import Launch
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.ownership import Ownership, owner_at
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from dynamo_local.supervisor.server.settings import ServerSettings
from dynamo_local.tasks import TaskGuard
from state.locks import LockTimeoutError

_LOOK_EVERY_S = 1.0
_SILENT_LOOKS = 3
"""A node server that is silent at so many looks, of whose workers nothing is heard either, is ended by the cluster."""

_RETRY_MAX_S = 30.0
"""Longest wait between two attempts to add a worker that was lost with its node, while no device comes."""

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
        self._cluster: Cluster | None = None
        self._places: ClusterPlaces | None = None
        self._silent: dict[str, int] = {}
        self._lost: dict[str, AddWorker] = {}
        """Workers that were lost with their nodes, and whose claims are to be released."""
        self._missing: list[AddWorker] = []
        """Workers that were lost with their nodes, and for which there is no place yet."""
        self._devices = 0.0
        self._tried_at, self._delay_s = -math.inf, 0.0
        self._failure = ReportOnce(report)

    async def connect(self, stack: AsyncExitStack, hurry: asyncio.Event) -> None:
        """Connect to the cluster, own the namespace there, and clear what a server of it that has crashed has left.

        Raises NamespaceBusyError if another server owns it, UsageError, SupervisorError.
        """
        launch = self._launch
        self._cluster = cluster = await connect(launch.environment, launch.graph.namespace, launch.cluster_address)
        stack.push_async_callback(cluster.close)
        record = ClusterRecord(cluster)
        await self._ownership.confirm(record)
        stack.push_async_callback(self._let_go, record)
        self._kept.spawn("ownership", self._ownership.keep(record))
        self._tasks.spawn("ownership in the cluster", self._kept.failed())
        await Slots(cluster, launch.graph.namespace).clear()
        stack.push_async_callback(self.end, hurry)

    async def start(self, bus: Bus, address: BusAddress, watch: FleetWatch) -> None:
        """Answer for all places, follow the fleet and the nodes. `address`: of the bus, for the nodes."""
        assert self._cluster is not None, "connect first"
        machinery, launch = self._machinery, self._launch
        books, subjects = Books(machinery.store), Subjects(launch.graph.namespace)
        owner = (await books.read()).owner.pid
        local = LocalPlaces(
            books,
            launch.inventory,
            MachineDevices(bus, subjects, launch.inventory, owner),
            CircusWatchers(machinery.circus, machinery.specs, machinery.registry.pid_of, self._report),
            launch.paths.log_file,
        )
        self._places = places = ClusterPlaces(
            self._cluster,
            Slots(self._cluster, launch.graph.namespace),
            books,
            local,
            node=lambda name: FarPlaces(bus, subjects.node(name), f"node {name}"),
            order=lambda node: self._order(node, address),
            graph=lambda revision: launch.paths.graph_of(revision).read_bytes(),
            is_heard=lambda name: any(presence.watcher == name for presence in watch.view.members()),
            kind=launch.inventory.kind,
        )
        await self._count_devices()
        await PlacesService(places, self._tasks).serve(bus, subjects.places)
        mirror = PresenceMirror(books, watch.view.members)
        watch.subscribe(mirror.on_change)
        self._tasks.spawn("mirror", mirror.run())
        self._beats = self._kept.spawn("beats", beat_apart(address, subjects, self._id))

    async def add_first_workers(self) -> None:
        """Add the workers that the graph has at the start, side by side, and keep nodes and reservations in order.

        Raises SupervisorError if one of them does not become ready.
        """
        assert self._places is not None, "start first"
        workers = [template for template in self._launch.templates if template.role in ENGINE_ROLES]
        namespace = self._launch.graph.namespace
        await self._places.prepare(
            {one.watcher(namespace, index): need_of(one) for one in workers for index in range(one.workers)}
        )
        await self._add([AddWorker(one.role, one.service) for one in workers for _ in range(one.workers)])
        self._tasks.spawn("nodes", self._keep())

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
        assert self._cluster is not None
        try:
            await self._ownership.confirm(ClusterRecord(self._cluster))
            if self._places is None:
                await Slots(self._cluster, self._launch.graph.namespace).clear()
            else:
                await self._places.end_all()
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
        is_cpu = self._launch.inventory.kind == "cpu-slot"
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

    async def _add(self, changes: Sequence[AddWorker]) -> None:
        """Raises SupervisorError for the first worker that could not be added."""
        async with open_actuator(self._launch.paths, self._report) as actuator:
            for outcome in await actuator.apply_all(changes, DeviceLimits()):
                if not outcome.done:
                    raise SupervisorError(outcome.note, "see `dynamo events`, and `dynamo logs` of that worker")

    async def _keep(self) -> None:
        """Find reservations and processes that were lost, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._look()
            except DynamoError as error:
                self._failure.note(f"the nodes are not in order for now: {error}")
            else:
                if not self._missing:
                    self._failure.note("")

    async def _count_devices(self) -> None:
        """Write down how many devices the workers hold or may take."""
        assert self._places is not None
        total, blueprint = await self._places.device_count(), self._machinery.blueprint
        await asyncio.to_thread(blueprint.change, lambda before: replace(before, cluster_devices=total))

    async def _look(self) -> None:
        assert self._places is not None
        places = self._places
        await self._count_devices()
        silent = await places.silent()
        self._silent = {node: self._silent.get(node, 0) + 1 for node in silent}
        for node in [node for node, looks in self._silent.items() if looks >= _SILENT_LOOKS]:
            self._report.step(f"node {node} does not answer: its node server is ended")
            await places.give_up(node)
        lost = await places.lost()
        if not self._is_planned:
            own = (entry for entry in lost if not entry.watcher.revision)
            self._lost |= {one.watcher_name: AddWorker(self._role(one.component), one.component) for one in own}
        if lost or await places.leaks():
            await self._reconcile()
        await self._note_missing()
        await self._replace()

    async def _reconcile(self) -> None:
        """Release what is lost or leaks. Whoever changes something at the moment has done so first, or is followed by
        the next look."""
        with suppress(LockTimeoutError):
            async with open_actuator(self._launch.paths, self._report, lock_wait_s=0.0) as actuator:
                for note in await actuator.reconcile():
                    self._report.step(note)

    async def _note_missing(self) -> None:
        """Count as missing those that were lost and are released by now."""
        assert self._places is not None
        if not self._lost:
            return
        entries = (await self._places.books.read()).components
        still = {one.watcher_name for one in await self._places.lost()}
        for name in [name for name in self._lost if name not in still]:
            change = self._lost.pop(name)
            if name not in entries or not entries[name].holds:
                self._missing.append(change)

    async def _replace(self) -> None:
        """Add the workers that are missing, at once when there are more devices, else less and less often. Raises
        SupervisorError if that fails, as it does while there is no room."""
        devices = self._machinery.blueprint.current().device_count
        if devices > self._devices:
            self._delay_s = 0.0
        self._devices = devices
        while self._missing and time.monotonic() >= self._tried_at + self._delay_s:
            self._tried_at = time.monotonic()
            self._delay_s = min(_RETRY_MAX_S, max(_LOOK_EVERY_S, 2 * self._delay_s))
            await self._add(self._missing[:1])
            self._missing.pop(0)
            self._delay_s = 0.0

    @property
    def _is_planned(self) -> bool:
        """Whether a planner decides how many workers there are to be. For those of endpoints the server does."""
        planners = (service for service in self._launch.graph.services if service.role == _PLANNER_ROLE)
        return any(service.config.get(_NO_OPERATION) is False for service in planners)

    def _role(self, service: str) -> str:
        return next(template.role for template in self._launch.templates if template.service == service)
