"""A running server, from its first file to its last process: brought up in order, kept running, taken down in
reverse."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.control.operations import CHANGES, DIAGNOSE, GET_USAGE, ROTATE_TOKEN, STOP, Call
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.listener import ListenerHolder, bind
from dynamo_local.supervisor.actuator.actuators import Actuators, BusFleet, Reconciler
from dynamo_local.supervisor.actuator.commands import ActingPlanner, WorkerOrders
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.handlers import admin_handlers
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket, Orders
from dynamo_local.supervisor.control.reports import EventAnswers, LogAnswers
from dynamo_local.supervisor.diagnosis import tell_findings
from dynamo_local.supervisor.jobs import Jobs
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.server.controlled import ControlledServer, Controller
from dynamo_local.supervisor.server.launch.addresses import answers
from dynamo_local.supervisor.server.launch.plan import hands_over, plan_bus, stop_order
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.nats.nats_server import NatsServer, bring_up, write_bus_address
from dynamo_local.supervisor.server.nats.rotation import (
    NATS_OF_OTHERS,
    ON_NODES,
    TokenOrders,
    TokenRotation,
)
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.supervisor.server.nodes import ServerNodes
from dynamo_local.supervisor.server.ownership import Ownership
from dynamo_local.supervisor.server.reports.progress import Progress, ready_lines
from dynamo_local.supervisor.server.settings import StopRequest
from dynamo_local.supervisor.upkeep.usage import UsageUpkeep
from dynamo_local.tasks import TaskGuard
from state.endpoints.board import read_board
from state.record import ServerRecord
from state.statefile.transitions import heard

_CIRCUS_DEADLINE_S = 30.0
"""For changes: long enough for a circusd that other programs starve."""


@dataclass(eq=False, repr=False)
class Server:
    """Runs one launch. The caller holds the namespace's server lock and the devices, and has cleared leftovers.

    `ownership`: of the namespace on the bus; where that is the bus of others, `kept` keeps it, and the failure of that
    ends the server. `controller`: runs within the server as soon as workers may be added and
    removed.
    """

    machinery: Machinery
    ownership: Ownership
    kept: TaskGuard
    controller: Controller | None = None
    was_ready: bool = field(default=False, init=False)
    """Whether all services have been ready at the same time."""
    _bus: BusAddress | NatsServer = field(init=False)
    _streams: ServerStreams = field(init=False)
    _nodes: ServerNodes | None = field(default=None, init=False)
    _link: Bus | None = field(default=None, init=False)
    """The server's connection to NATS: commands look at what is drained by it."""

    def __post_init__(self) -> None:
        machinery, launch = self.machinery, self.machinery.launch
        self._bus = launch.bus or NatsServer.at(launch.paths.nats_dir, launch.bus_host)
        self._streams = ServerStreams(launch.graph, machinery.report, self.ownership, own_nats=launch.bus is None)
        if launch.clustered:
            self._nodes = ServerNodes(machinery)

    async def run(self, stop: StopRequest) -> None:
        """Bring the graph up and keep it until a stop is wanted. Leaves nothing behind, however it ends.

        Raises SupervisorError when a service cannot be started or kept running.
        """
        machinery = self.machinery
        # Never cancelled from outside: whatever was begun is undone to the end. Each step pushes on the stack what
        # undoes it.
        async with AsyncExitStack() as stack:
            await machinery.make_files(stack, self._bus, self._plans())
            control = await self._open_control(stack)
            if self._nodes is not None:
                await self._nodes.connect(stack, stop.hurry)
            usage = UsageUpkeep(machinery.launch.paths, machinery.report, machinery.settings.usage_days)
            control.take({GET_USAGE: usage.tell})
            control.take(Jobs(machinery.launch.paths).handlers)
            control.take({DIAGNOSE: partial(tell_findings, machinery.launch.paths)})
            control.take({STOP: partial(self._stop, stop)})
            api = self._open_api(stack)
            await machinery.start(stack)
            circus = CircusClient(machinery.sockets.circus_endpoint, deadline_s=_CIRCUS_DEADLINE_S)
            await stack.enter_async_context(circus)
            asked = AskedServer(machinery.launch.paths, machinery.store, machinery.circus, machinery.events.record)
            control.take(admin_handlers(asked))
            if isinstance(self._bus, BusAddress):
                # Deleted once all services have ended. A NATS server of our own takes its streams with it.
                stack.push_async_callback(self._streams.delete, self._bus)
            stack.push_async_callback(self._close_link)
            after_root = partial(self._end_of_requests, stop.hurry)
            stack.push_async_callback(machinery.drain, stop_order(machinery.launch.graph), stop.hurry, after_root)
            # Pushed after the drain, hence called before it: connections that no frontend takes are refused then, and
            # nobody restarts what is being stopped.
            if api is not None:
                stack.callback(api.close)
                machinery.tasks.spawn("API's socket", api.run())
            stack.push_async_callback(machinery.tasks.close)
            # What runs is only looked at from here on.
            stack.callback(control.withdraw, CHANGES)
            machinery.keep(self._plans(), on_room=self._streams.renew)
            machinery.tasks.spawn("operation", self._operate(control, asked, circus))
            machinery.tasks.spawn("kept ownership", self.kept.failed())
            machinery.tasks.spawn("usage", usage.run())
            await machinery.until(stop.wanted)
            machinery.events.stopping()

    async def _end_of_requests(self, hurry: asyncio.Event) -> None:
        """End what is to end once nobody sends requests any more, and while NATS runs."""
        if self._nodes is not None:
            await self._nodes.end(hurry)
        await self._close_link()

    async def _close_link(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None

    async def _stop(self, stop: StopRequest, call: Call) -> dict[str, Any]:
        hurry = call.switch("hurry")
        self.machinery.report.step(f"ordered to stop{' at once' if hurry else ''}")
        stop.wanted.set()
        if hurry:
            stop.hurry.set()
        return {"object": "server", "namespace": self.machinery.launch.graph.namespace, "phase": "stopping"}

    async def _open_control(self, stack: AsyncExitStack) -> ControlApi:
        """Answer the control API from now on, until everything else has ended. Raises StateError."""
        control = ControlApi()
        socket = ControlSocket(control, self.machinery.sockets.control)
        answering = asyncio.create_task(socket.run(), name="control API")
        stack.push_async_callback(socket.close, answering)
        # Before the socket is closed, which waits for those who follow them.
        stack.callback(self.machinery.events.recent.end)
        control.take(EventAnswers(self.machinery.events.recent).handlers)
        self.machinery.tasks.spawn("end of the control API", _end_of(answering))
        return control

    def _open_api(self, stack: AsyncExitStack) -> ListenerHolder | None:
        """Open the socket of the API, for the frontends that start. None: the root service binds its address for
        itself. Raises PortInUseError, SupervisorError."""
        http = self.machinery.launch.http
        if not hands_over(self.machinery.launch.graph, http):
            return None
        api = ListenerHolder(bind(http.host, http.port), http.handover)
        stack.callback(api.close)
        return api

    def _plans(self) -> tuple[WatcherPlan, ...]:
        """The watchers to start with: NATS, the fork server, then the services."""
        nats = (self._nats_plan(self._bus),) if isinstance(self._bus, NatsServer) else ()
        forkserver = (self.machinery.launch.forkserver,) if self.machinery.launch.forkserver is not None else ()
        return (*nats, *forkserver, *self.machinery.launch.services)

    def _nats_plan(self, server: NatsServer) -> WatcherPlan:
        return plan_bus(self.machinery.launch.graph.namespace, server.argv, self.machinery.launch.paths.root)

    def _first_watchers(self) -> tuple[str, ...]:
        """The watchers of all services at the start, those on nodes included."""
        namespace = self.machinery.launch.graph.namespace
        return tuple(
            str(template.watcher(namespace, index))
            for template in self.machinery.launch.templates
            for index in range(template.workers)
        )

    # Bring-up, then the steady state.

    async def _operate(self, control: ControlApi, asked: AskedServer, circus: CircusClient) -> None:
        machinery = self.machinery
        await machinery.begin()
        address = await self._bus_address()
        bus_file = machinery.launch.paths.bus_file
        await asyncio.to_thread(write_bus_address, bus_file, address)
        bus = await Bus.connect(address, name="supervisor", deadline_s=machinery.settings.bus_deadline_s, file=bus_file)
        self._link = bus
        await self._streams.create(bus)
        if machinery.launch.bus is None:
            # Ends with the connections of this server, before its NATS does.
            machinery.tasks.spawn("ownership", self.ownership.keep(self._streams.record(bus)))
        subjects = Subjects(machinery.launch.graph.namespace)
        watch = FleetWatch(bus, subjects, everywhere=True)
        progress = Progress(
            self._first_watchers(), machinery.report, machinery.restarter.note_ready, machinery.launch.importing
        )
        watch.subscribe(progress.on_change)
        await machinery.events.start(bus, watch)
        machinery.follow(watch)
        await asked.follow(bus, watch, machinery.registration)
        await watch.start()
        expiry = machinery.tasks.spawn("fleet", watch.run())
        machinery.hold_devices()
        for plan in machinery.launch.services:
            await machinery.add(plan)
        await machinery.allow_changes(self._machine_plans())
        await asyncio.to_thread(machinery.files.remember)
        self._take_token_orders(bus, watch, control)
        here = machinery.place(machinery.launch.inventory, circus, machinery.report)
        cluster = None if self._nodes is None else await self._nodes.start(bus, address, watch, here)
        asked.places = cluster or here
        actuators = Actuators(machinery, circus, BusFleet(bus, subjects.namespace, watch), asked, cluster)
        reconciler = Reconciler(actuators, machinery.report)
        machinery.files.on_healed = reconciler.request
        machinery.tasks.spawn("reconciler", reconciler.run())
        if self._nodes is not None:
            machinery.tasks.spawn("first workers", self._nodes.add_first_workers(actuators, reconciler))
        self._take_orders(bus, control, actuators, asked.places)
        self._spawn_controller(bus, watch, control, actuators)
        await self._await_ready(progress)
        await expiry

    def _machine_plans(self) -> tuple[WatcherPlan, ...]:
        """The watchers that are no service of the graph."""
        return tuple(plan for plan in self._plans() if plan not in self.machinery.launch.services)

    def _take_orders(self, bus: Bus, control: ControlApi, actuators: Actuators, places: Places) -> None:
        orders = Orders(self.machinery.tasks)
        control.take(orders.handlers)
        planner = ActingPlanner(self.machinery.launch.paths.namespace)
        control.take(WorkerOrders(actuators, bus, orders, self.machinery.events.record, planner).handlers)
        control.take(LogAnswers(places).handlers)

    def _spawn_controller(self, bus: Bus, watch: FleetWatch, control: ControlApi, actuators: Actuators) -> None:
        if self.controller is None:
            return
        nodes = self._nodes
        server = ControlledServer(
            *(self.machinery.launch, actuators, self.machinery.lock, self.machinery.settings, bus),
            registration=self.machinery.registration,
            blueprint=self.machinery.blueprint,
            streams=self._streams,
            given_up=self.machinery.restarter.given_up if nodes is None else nodes.given_up,
            report=self.machinery.report,
            record=self.machinery.events.record,
            members=watch.view.members,
            control=control,
            nodes=None if nodes is None else lambda: nodes.capacity,
        )
        self.machinery.tasks.spawn("controller", self.controller(server))

    def _take_token_orders(self, bus: Bus, watch: FleetWatch, control: ControlApi) -> None:
        rotation, why_not = None, NATS_OF_OTHERS
        if self._nodes is not None:
            why_not = ON_NODES
        elif isinstance(self._bus, NatsServer):
            nats = self._nats_plan(self._bus).name
            rotation = TokenRotation(
                *(self._bus, self.machinery.circus, nats, bus, self.machinery.launch.paths.bus_file),
                subjects=Subjects(self.machinery.launch.graph.namespace),
                members=watch.view.members,
                remember=self.machinery.files.remember,
            )
        orders = TokenOrders(
            rotation, self.machinery.tasks, self.machinery.events.record, self.machinery.report, why_not=why_not
        )
        control.take({ROTATE_TOKEN: orders.rotate})

    async def _bus_address(self) -> BusAddress:
        """The address of the NATS server, which is started if it is ours."""
        if isinstance(self._bus, BusAddress):
            self.machinery.report.step(f"using the NATS server at {self._bus.shown}")
            return self._bus
        machinery, plan = self.machinery, self._nats_plan(self._bus)
        spec = machinery.specs.of(plan)
        self._bus, pid = await bring_up(self._bus, spec, machinery.circus, machinery.settings.bus_deadline_s)
        # It announces nothing itself.
        nats = Presence(plan.name, plan.watcher.service, plan.role, secrets.token_hex(8), pid, "ready")
        await asyncio.to_thread(machinery.store.update, lambda state: heard(state, [nats], lambda _: True))
        return self._bus.address

    async def _await_ready(self, progress: Progress) -> None:
        try:
            async with asyncio.timeout(self.machinery.settings.ready_deadline_s):
                await progress.wait()
        except TimeoutError as error:
            raise SupervisorError(
                f"not ready within {self.machinery.settings.ready_deadline_s:g} s: {progress.not_ready()}",
                "see `dynamo logs`; a longer --ready-timeout may help",
            ) from error
        # Whoever learns that all are ready finds them in the statefile.
        await self.machinery.registration.write()
        root = progress.presence(self.machinery.launch.services[-1].name)
        url = root.url if root is not None else None
        if url is None and await asyncio.to_thread(answers, self.machinery.launch.http):
            url = self.machinery.launch.http.url
        await self.machinery.directory.note(ServerRecord("running", url, progress.models()))
        board = await asyncio.to_thread(read_board, self.machinery.launch.paths)
        endpoints = () if board is None else board.endpoints
        ready, *next_steps = ready_lines(url, progress.summary(), progress.models(), progress.tasks(), endpoints)
        self.was_ready = True
        self.machinery.events.ready(ready)
        self.machinery.report.say("\n".join((ready, *next_steps)))


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for a task that goes on when this one is cancelled. Raises what it raises."""
    await asyncio.shield(task)
