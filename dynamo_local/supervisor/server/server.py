"""A running server, from its first file to its last process: brought up in order, kept running, taken down in
reverse."""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.names import BUS_SERVICE, Watcher
from dynamo_local.core.process.restarts import RestartLimits
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.ancestry import adopt_orphans
from dynamo_local.process.death_pipe import DeathPipe
from dynamo_local.process.listener import ListenerHolder, bind
from dynamo_local.supervisor.actuator.reconciler import Reconciler
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.daemon_restarts import CircusRestarts
from dynamo_local.supervisor.circus.drain import Drain, Watched
from dynamo_local.supervisor.circus.events import EventStream
from dynamo_local.supervisor.circus.process_registry import StateRegistry
from dynamo_local.supervisor.circus.takeover import CircusTakeover
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.server.controlled import ControlledServer, Controller
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.listening import answers
from dynamo_local.supervisor.server.launch.plan import hands_over, plan_bus, stop_order
from dynamo_local.supervisor.server.launch.prepare import Launch, shown_url
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from dynamo_local.supervisor.server.nats_server import NatsServer, bring_up, write_bus_address
from dynamo_local.supervisor.server.reports.event_sources import ServerEvents
from dynamo_local.supervisor.server.reports.progress import Progress
from dynamo_local.supervisor.server.reports.ready_lines import ready_lines
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.rotation import NatsProcesses, TokenRotation
from dynamo_local.supervisor.server.run_directory import RunDirectory
from dynamo_local.supervisor.server.settings import ServerSettings, StopRequest
from dynamo_local.supervisor.server.streams import ServerStreams
from dynamo_local.supervisor.server.token_orders import TokenOrders
from dynamo_local.supervisor.upkeep.cpu_affinity import CpuAffinity
from dynamo_local.supervisor.upkeep.devices import DeviceHolding, DeviceHolds
from dynamo_local.supervisor.upkeep.disk import DiskUpkeep
from dynamo_local.supervisor.upkeep.files import ServerFiles
from dynamo_local.supervisor.upkeep.orphans import Reaper
from dynamo_local.supervisor.upkeep.restarter import Restarter
from dynamo_local.supervisor.upkeep.usage import UsageUpkeep
from dynamo_local.tasks import TaskGuard
from state.endpoints.board import read_board
from state.locks import ServerLock
from state.paths import Sockets
from state.record import ServerRecord
from state.statefile.store import StateStore
from state.statefile.transitions import set_lease


class Server:
    """Runs one launch. The caller holds the namespace's server lock and the devices, and has cleared leftovers.

    `controller`: runs within the server as soon as workers may be added and removed.
    """

    def __init__(
        self,
        launch: Launch,
        settings: ServerSettings,
        report: Report,
        lock: ServerLock,
        holds: DeviceHolds,
        controller: Controller | None = None,
    ) -> None:
        self._launch = launch
        self._paths = launch.paths
        self._settings = settings
        self._report = report
        self._lock = lock
        self._holds = holds
        self._controller = controller
        self._blueprint = BlueprintFile(launch.paths)
        self._directory = RunDirectory(launch, lock, report)
        self._store = StateStore(launch.paths)
        self._registry = StateRegistry(self._store)
        self._reconciler = Reconciler(launch.paths, report)
        self._events = ServerEvents(launch.paths, report)
        self._bus: BusAddress | NatsServer = launch.bus or NatsServer.at(launch.paths.nats_dir)
        self._streams = ServerStreams(launch.graph, report)
        self._tasks = TaskGuard()
        self._death_pipe = DeathPipe()
        self.was_ready = False
        """Whether all services have been ready at the same time."""

    async def run(self, stop: StopRequest) -> None:
        """Bring the graph up and keep it until a stop is wanted. Leaves nothing behind, however it ends.

        Raises SupervisorError when a service cannot be started or kept running.
        """
        # Never cancelled from outside: whatever was begun is undone to the end. Each step pushes on the stack what
        # undoes it.
        async with AsyncExitStack() as stack:
            sockets = await self._directory.create(stack, self._bus)
            stack.enter_context(self._events.of_server(self._launch.graph.target))
            await self._directory.create_state(stack, sockets, self._plans())
            api = self._open_api(stack)
            circusd = await self._start_circusd(stack, sockets)
            circus = await stack.enter_async_context(circusd.client())
            events = await stack.enter_async_context(EventStream(sockets.circus_pubsub_endpoint))
            if isinstance(self._bus, BusAddress):
                # Deleted once all services have ended. A NATS server of our own takes its streams with it.
                stack.push_async_callback(self._streams.delete, self._bus)
            stack.push_async_callback(self._drain, circusd, circus, stop.hurry)
            # Pushed after the drain, hence called before it: connections that no frontend takes are refused then, and
            # nobody restarts what is being stopped.
            if api is not None:
                stack.callback(api.close)
                self._tasks.spawn("API's socket", api.run())
            stack.push_async_callback(self._tasks.close)
            restarter = self._restarter(circus)
            files = ServerFiles(
                self._paths,
                sockets,
                self._lock,
                self._report,
                revisions=self._blueprint.revisions,
                on_healed=self._reconciler.request,
                on_unreachable=circusd.renew,
            )
            self._tasks.spawn("files", files.run())
            self._tasks.spawn("circusd", circusd.run())
            self._tasks.spawn("operation", self._operate(circusd, circus, restarter, events, files))
            disk = DiskUpkeep(self._paths, self._report, self._events.flush, self._streams.renew)
            self._tasks.spawn("disk", disk.run())
            self._tasks.spawn("usage", UsageUpkeep(self._paths, self._report, self._settings.usage_days).run())
            await self._until(stop.wanted)
            self._events.stopping()

    async def _until(self, wanted: asyncio.Event) -> None:
        """Wait for the event, or raise the error that a task failed with."""
        failed = asyncio.create_task(self._tasks.failed())
        stopped = asyncio.create_task(wanted.wait())
        done, _ = await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        stopped.cancel()
        if failed in done:
            await failed

    def _open_api(self, stack: AsyncExitStack) -> ListenerHolder | None:
        """Open the socket of the API, for the frontends that start. None: the root service binds its address for
        itself. Raises PortInUseError, SupervisorError."""
        http = self._launch.http
        if not hands_over(self._launch.graph, http):
            return None
        api = ListenerHolder(bind(http.host, http.port), http.handover)
        stack.callback(api.close)
        return api

    def _plans(self) -> tuple[WatcherPlan, ...]:
        """The watchers to start with: NATS, the fork server, then the services."""
        nats = (self._nats_plan(self._bus),) if isinstance(self._bus, NatsServer) else ()
        forkserver = (self._launch.forkserver,) if self._launch.forkserver is not None else ()
        return (*nats, *forkserver, *self._launch.services)

    def _nats_plan(self, server: NatsServer) -> WatcherPlan:
        return plan_bus(self._launch.graph.namespace, server.argv, self._paths.root)

    def _service_names(self) -> tuple[str, ...]:
        return tuple(plan.name for plan in self._launch.services)

    async def _start_circusd(self, stack: AsyncExitStack, sockets: Sockets) -> CircusRestarts:
        adopt_orphans()
        stack.callback(self._death_pipe.close)
        circusd = await CircusRestarts.start(self._paths, sockets, self._report, self._settings.circus_deadlines)
        circusd.record = self._events.record
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, Reaper(lambda: circusd.pid).look)
        stack.push_async_callback(circusd.end, self._settings.quit_deadline_s)
        return circusd

    # Bring-up, then the steady state.

    async def _operate(
        self,
        circusd: CircusRestarts,
        circus: CircusClient,
        restarter: Restarter,
        events: EventStream,
        files: ServerFiles,
    ) -> None:
        await circus.statuses()
        self._tasks.spawn("exits", restarter.listen(events))
        self._tasks.spawn("restarter", restarter.run())
        if self._launch.forkserver is not None:
            # First of all, for it takes longest; only the services that are forked from it wait for it.
            await circus.add(self._watcher_specs().of(self._launch.forkserver))
        address = await self._bus_address(circus)
        bus_file = self._paths.bus_file
        await asyncio.to_thread(write_bus_address, bus_file, address)
        bus = await Bus.connect(address, name="supervisor", deadline_s=self._settings.bus_deadline_s, file=bus_file)
        try:
            await self._streams.create(bus)
            watch = FleetWatch(bus, Subjects(self._launch.graph.namespace), everywhere=True)
            progress = Progress(self._service_names(), self._report, restarter.note_ready, self._launch.importing)
            watch.subscribe(progress.on_change)
            await self._events.start(bus, watch)
            files.members = watch.view.members
            self._spawn_cpu_affinity(watch)
            await watch.start()
            expiry = self._tasks.spawn("fleet", watch.run())
            specs = self._watcher_specs()
            self._spawn_device_holding(bus)
            for plan in self._launch.services:
                await circus.add(specs.of(plan))
            await self._allow_changes(circusd, specs)
            await asyncio.to_thread(files.remember)
            await self._take_token_orders(circus, bus, watch, files)
            self._spawn_controller(bus, restarter, watch)
            await self._await_ready(progress)
            await expiry
        finally:
            await bus.close()

    def _spawn_device_holding(self, bus: Bus) -> None:
        launch, on_claims = self._launch, self._events.devices.on_state
        holding = DeviceHolding(self._store, launch.inventory, self._templates, self._holds, on_claims)
        self._tasks.spawn("devices", holding.run(bus, Subjects(self._launch.graph.namespace)))

    def _templates(self) -> tuple[ServiceTemplate, ...]:
        return (*self._launch.templates, *self._blueprint.of_endpoints())

    def _spawn_controller(self, bus: Bus, restarter: Restarter, watch: FleetWatch) -> None:
        if self._controller is None:
            return
        server = ControlledServer(
            *(self._launch, self._lock, self._settings, bus, self._blueprint, self._streams),
            given_up=restarter.given_up,
            report=self._report,
            record=self._events.record,
            members=watch.view.members,
        )
        self._tasks.spawn("controller", self._controller(server))

    async def _take_token_orders(self, circus: CircusClient, bus: Bus, watch: FleetWatch, files: ServerFiles) -> None:
        rotation = None
        if isinstance(self._bus, NatsServer):
            nats = NatsProcesses(circus, self._nats_plan(self._bus).name)
            rotation = TokenRotation(
                *(self._bus, nats, bus, self._paths.bus_file),
                subjects=Subjects(self._launch.graph.namespace),
                members=watch.view.members,
                remember=files.remember,
            )
        orders = TokenOrders(rotation, self._tasks, self._events.record, self._report)
        await orders.start(bus, Subjects(self._launch.graph.namespace))

    def _spawn_cpu_affinity(self, watch: FleetWatch) -> None:
        if self._launch.inventory.kind == "gpu":
            return
        bus = str(Watcher(self._launch.graph.namespace, BUS_SERVICE))
        affinity = CpuAffinity(self._launch.inventory, self._store, watch.view.members, bus)
        watch.subscribe(affinity.on_change)
        self._tasks.spawn("cores", affinity.run())

    async def _bus_address(self, circus: CircusClient) -> BusAddress:
        """The address of the NATS server, which is started if it is ours."""
        if isinstance(self._bus, BusAddress):
            self._report.step(f"using the NATS server at {shown_url(self._bus)}")
            return self._bus
        plan = self._nats_plan(self._bus)
        spec = self._watcher_specs().of(plan)
        self._bus, pid = await bring_up(self._bus, spec, circus, self._settings.bus_deadline_s)
        lease = secrets.token_hex(8)
        await asyncio.to_thread(self._store.update, lambda state: set_lease(state, plan.watcher, lease, pid))
        return self._bus.address

    def _watcher_specs(self) -> WatcherSpecs:
        return WatcherSpecs(self._paths, self._death_pipe.address, Path.cwd())

    async def _allow_changes(self, circusd: CircusRestarts, specs: WatcherSpecs) -> None:
        """Allow that workers are added and removed, and that circusd dies and is replaced."""
        blueprint = Blueprint(
            specs.death_pipe,
            str(specs.working_dir),
            self._launch.inventory,
            self._launch.templates,
            self._settings.ready_deadline_s,
            self._settings.drain_deadline_s,
        )
        await asyncio.to_thread(self._blueprint.write, blueprint)
        self._tasks.spawn("reconciler", self._reconciler.run())
        machinery = {plan.name: plan for plan in self._plans() if plan not in self._launch.services}
        circusd.takeover = CircusTakeover(self._store, self._blueprint.current, specs, machinery)

    async def _await_ready(self, progress: Progress) -> None:
        try:
            async with asyncio.timeout(self._settings.ready_deadline_s):
                await progress.wait()
        except TimeoutError as error:
            raise SupervisorError(
                f"not ready within {self._settings.ready_deadline_s:g} s: {progress.not_ready()}",
                "see `dynamo logs`; a longer --ready-timeout may help",
            ) from error
        root = progress.presence(self._launch.services[-1].name)
        url = root.url if root is not None else None
        if url is None and await asyncio.to_thread(answers, self._launch.http):
            url = self._launch.http.url
        await self._directory.note(ServerRecord("running", url, progress.models()))
        board = await asyncio.to_thread(read_board, self._paths)
        endpoints = () if board is None else board.endpoints
        ready, *next_steps = ready_lines(url, progress.summary(), progress.models(), progress.tasks(), endpoints)
        self.was_ready = True
        self._events.ready(ready)
        self._report.say("\n".join((ready, *next_steps)))

    def _restarter(self, circus: CircusClient) -> Restarter:
        quiet = {plan.name for plan in self._plans()} - set(self._service_names())
        limits = RestartLimits(max_delay_s=self._settings.restart_delay_max_s)
        expendable = () if self._launch.forkserver is None else (self._launch.forkserver.name,)
        log_file = self._paths.log_file
        return Restarter(
            *(circus, self._registry, log_file, self._report),
            quiet=quiet,
            expendable=expendable,
            limits=limits,
            record=self._events.record,
        )

    # The way down.

    async def _drain(self, circusd: CircusRestarts, circus: CircusClient, hurry: asyncio.Event) -> None:
        await self._directory.note(ServerRecord("stopping"))
        await self._directory.forbid_changes(self._blueprint)
        deadline_s, registered = self._settings.drain_deadline_s, self._registry.pid_of

        def drain(watched: Watched) -> Drain:
            return Drain(watched, self._report, hurry, deadline_s, registered)

        await circusd.stop(drain, circus, stop_order(self._launch.graph))
