"""A node server: brought up in order, kept running, taken down in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from dynamo_local.bus.nats import Bus, publish_event
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.node.order import NodeOrder
from dynamo_local.supervisor.node.places import NodePlaces
from dynamo_local.supervisor.node.plans import NodePlans
from dynamo_local.supervisor.node.silence import HeadSilence, gone
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.service import PlacesService
from dynamo_local.supervisor.server.launch.launch import Launch
from dynamo_local.supervisor.server.launch.plan import stop_order
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.nats.nats_server import write_bus_address
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.settings import ServerSettings, StopRequest
from dynamo_local.supervisor.upkeep.devices import DeviceHolds
from state.locks import ServerLock
from state.record import ServerRecord


class NodeServer:
    """Runs workers of one graph on this node. The caller holds the namespace's server lock, and has cleared leftovers.

    `on_ready` is called once orders are answered. `ahead`: see Machinery.
    """

    def __init__(
        self,
        order: NodeOrder,
        launch: Launch,
        report: Report,
        lock: ServerLock,
        holds: DeviceHolds,
        on_ready: Callable[[], None],
        ahead: CircusAhead | None = None,
    ) -> None:
        self._order = order
        self._launch = launch
        self._paths = launch.paths
        self._report = report
        self._on_ready = on_ready
        self._settings = ServerSettings(
            ready_deadline_s=order.ready_deadline_s, drain_deadline_s=order.drain_deadline_s
        )
        self._machinery = Machinery(launch, self._settings, report, lock, holds, ahead=ahead, all_expendable=True)
        self._tasks = self._machinery.tasks
        self._subjects = Subjects(order.namespace)
        self._head = HeadSilence(order.server)

    async def run(self, stop: StopRequest, watch_pid: int | None = None) -> None:
        """Run workers until a stop is wanted, or it ends by itself (silence.py). Leaves nothing behind.

        `watch_pid`: a process with which this one ends. Raises SupervisorError, BusError when it cannot start.
        """
        machinery = self._machinery
        plans = () if self._launch.forkserver is None else (self._launch.forkserver,)
        async with AsyncExitStack() as stack:
            await machinery.make_files(stack, self._order.bus, plans)
            await asyncio.to_thread(write_bus_address, self._paths.bus_file, self._order.bus)
            await machinery.start(stack)
            stack.push_async_callback(machinery.drain, stop_order(self._launch.graph), stop.hurry)
            stack.push_async_callback(self._tasks.close)
            machinery.keep(plans)
            self._tasks.spawn("operation", self._operate())
            self._tasks.spawn("head", self._stop_after(self._head.over(), stop))
            if watch_pid is not None:
                self._tasks.spawn("watched process", self._stop_after(gone(watch_pid), stop, hurry=True))
            await machinery.until(stop.wanted)
            machinery.events.stopping()

    async def _stop_after(self, over: Awaitable[str], stop: StopRequest, *, hurry: bool = False) -> None:
        """Stop for the reason that is awaited. `hurry`: at once, since the devices may be another one's by now."""
        self._report.step(f"stopping: {await over}")
        if hurry:
            stop.hurry.set()
        stop.wanted.set()

    async def _operate(self) -> None:
        machinery, settings = self._machinery, self._settings
        await machinery.begin()
        name = f"node {self._order.node}"
        address, file = self._order.bus, self._paths.bus_file
        bus = await Bus.connect(address, name=name, deadline_s=settings.bus_deadline_s, file=file)
        try:
            machinery.events.listeners.append(self._tell(bus))
            await self._head.listen(bus, self._subjects)
            watch = FleetWatch(bus, self._subjects, everywhere=True)
            machinery.follow(watch)
            await watch.start()
            expiry = self._tasks.spawn("fleet", watch.run())
            machinery.hold_devices()
            await machinery.allow_changes(() if self._launch.forkserver is None else (self._launch.forkserver,))
            await asyncio.to_thread(machinery.files.remember)
            await self._serve(bus)
            await machinery.directory.note(ServerRecord("running"))
            self._on_ready()
            await expiry
        finally:
            await bus.close()

    async def _serve(self, bus: Bus) -> None:
        """Answer orders to this node."""
        machinery, inventory = self._machinery, self._launch.inventory
        local = machinery.place(inventory, machinery.circus, self._report)
        plans = NodePlans(self._order.node, self._paths, inventory, machinery.blueprint)

        def present() -> set[str]:
            entries = machinery.store.read().components.values()
            return {entry.watcher.revision for entry in entries if entry.holds}

        async def learn(revision: str, graph: bytes) -> None:
            await asyncio.to_thread(plans.learn, revision, graph, present)

        service = PlacesService(
            NodePlaces(local, Books(machinery.store), plans.plan, machinery.restarter.given_up), self._tasks, learn
        )
        await service.serve(bus, self._subjects.node(self._order.node))
        await bus.flush()

    def _tell(self, bus: Bus) -> Callable[[Event], None]:
        """Tells the head of the deaths of processes."""

        async def publish(event: Event) -> None:
            try:
                await publish_event(bus, self._subjects, event)
            except BusError as error:
                self._report.step(f"an event could not be told: {error}")

        def tell(event: Event) -> None:
            if event.kind == "death":
                self._tasks.spawn("event", publish(event))

        return tell
