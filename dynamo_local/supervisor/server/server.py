"""A server from its first file to its last process: brought up in order, kept running, taken down in
reverse."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.names import BUS_SERVICE, NAMESPACE_ENV, Subjects, Watcher
from dynamo_local.core.process.circus_deadlines import CircusDeadlines
from dynamo_local.core.process.restarts import RestartLimits
from dynamo_local.process.ancestry import adopt_orphans
from dynamo_local.process.death_pipe import DeathPipe
from dynamo_local.supervisor.actuator.reconciler import Reconciler
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.daemon_restarts import CircusRestarts
from dynamo_local.supervisor.circus.drain import Drain, Watched
from dynamo_local.supervisor.circus.events import EventStream
from dynamo_local.supervisor.circus.process_registry import StateRegistry
from dynamo_local.supervisor.circus.takeover import CircusTakeover
from dynamo_local.supervisor.circus.watchers import Placing
from dynamo_local.supervisor.server import logs
from dynamo_local.supervisor.server.blueprint import Blueprint
from dynamo_local.supervisor.server.launch import Launch, shown_url
from dynamo_local.supervisor.server.listening import answers
from dynamo_local.supervisor.server.nats_server import NatsServer, bring_up, write_bus_address
from dynamo_local.supervisor.server.plan import WatcherPlan, plan_bus, stop_order
from dynamo_local.supervisor.server.private_files import write_private
from dynamo_local.supervisor.server.progress import Progress
from dynamo_local.supervisor.server.report import Report
from dynamo_local.supervisor.server.streams import ServerStreams
from dynamo_local.supervisor.upkeep.cpu_affinity import CpuAffinity
from dynamo_local.supervisor.upkeep.devices import DeviceHolding, DeviceHolds
from dynamo_local.supervisor.upkeep.files import ServerFiles
from dynamo_local.supervisor.upkeep.orphans import Reaper
from dynamo_local.supervisor.upkeep.restarter import Restarter
from dynamo_local.tasks import TaskGuard
from state.files import make_run_directory, make_sockets
from state.locks import ServerLock
from state.model import recorded_environment
from state.paths import STATE_DIR_VARIABLE, Sockets
from state.processes import ProcFs, this_process
from state.reconcile import leftovers
from state.remains import remove_remains
from state.store import StateStore
from state.transitions import claim, new_state, set_lease

_ROTATE_EVERY_S = 5.0
_SURVIVOR_TERM_S = 0.0
_SURVIVOR_KILL_S = 10.0


@dataclass(frozen=True)
class ServerSettings:
    """`bus_deadline_s`: for NATS to come up. `ready_deadline_s`: for all services to be ready (a large model
    loads for minutes). `drain_deadline_s`: for each service to end by itself. `quit_deadline_s`: for
    circusd. `restart_delay_max_s`: a service that dies again and again waits no longer than this.
    `circus_patience`: with a circusd that does not answer."""

    bus_deadline_s: float = 15.0
    ready_deadline_s: float = 600.0
    drain_deadline_s: float = 30.0
    quit_deadline_s: float = 10.0
    restart_delay_max_s: float = RestartLimits.max_delay_s
    circus_patience: CircusDeadlines = field(default_factory=CircusDeadlines)


@dataclass
class StopRequest:
    """Asked for from outside: `wanted` ends the server in order, `hurry` cuts the waiting short."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """Runs one launch. The caller holds the namespace's server lock and the devices, and has cleared leftovers."""

    def __init__(
        self, launch: Launch, settings: ServerSettings, report: Report, lock: ServerLock, holds: DeviceHolds
    ) -> None:
        self._launch = launch
        self._paths = launch.paths
        self._settings = settings
        self._report = report
        self._lock = lock
        self._holds = holds
        self._store = StateStore(launch.paths)
        self._register = StateRegistry(self._store)
        self._janitor = Reconciler(launch.paths, report)
        self._bus: BusAddress | NatsServer = launch.bus or NatsServer.at(launch.paths.nats_dir)
        self._provisions = ServerStreams(launch.graph, report)
        self._tasks = TaskGuard()
        self._death_pipe = DeathPipe()

    async def run(self, stop: StopRequest) -> None:
        """Bring the graph up and keep it until a stop is wanted. Leaves nothing behind, however it ends.

        Raises SupervisorError when a service cannot be started or the machinery breaks.
        """
        # Never cancelled from outside: what was begun is undone to the end, whatever arrives meanwhile.
        async with AsyncExitStack() as stack:
            sockets = await self._enter_files(stack)
            watchers = self._planned()
            await self._enter_state(stack, sockets, watchers)
            circusd = await self._enter_circusd(stack, sockets)
            circus = await stack.enter_async_context(circusd.client())
            events = await stack.enter_async_context(EventStream(sockets.circus_pubsub_endpoint))
            if isinstance(self._bus, BusAddress):
                # Once all services have ended. A NATS server of our own takes everything with it.
                stack.push_async_callback(self._provisions.withdraw, self._bus)
            stack.push_async_callback(self._drain, circusd, circus, stop.hurry)
            # Entered after the drain, hence left before it: nobody restarts what is being stopped.
            stack.push_async_callback(self._tasks.close)
            keeper = self._keeper(circus)
            upkeep = ServerFiles(
                self._paths,
                sockets,
                self._lock,
                self._report,
                on_healed=self._janitor.want_look,
                on_unreachable=circusd.renew,
            )
            self._tasks.spawn("upkeep", upkeep.run())
            self._tasks.spawn("circusd", circusd.run())
            self._tasks.spawn("operation", self._operate(circusd, circus, keeper, events, upkeep))
            self._tasks.spawn("log rotation", self._rotate_logs())
            await self._until(stop.wanted)

    async def _until(self, wanted: asyncio.Event) -> None:
        """Wait for the event, or raise what a task failed with."""
        failed = asyncio.create_task(self._tasks.failed())
        stopped = asyncio.create_task(wanted.wait())
        done, _ = await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        stopped.cancel()
        if failed in done:
            await failed

    # Files, statefile, circusd: each registers what undoes it.

    async def _enter_files(self, stack: AsyncExitStack) -> Sockets:
        stack.push_async_callback(self._unless_replaced, lambda: remove_remains(self._paths))
        await asyncio.to_thread(make_run_directory, self._paths)
        await asyncio.to_thread(logs.start_afresh, self._paths.logs_dir)
        await asyncio.to_thread(write_private, self._paths.graph_file, self._launch.graph.to_json())
        if isinstance(self._bus, NatsServer):
            await asyncio.to_thread(self._bus.write_files)
        return await asyncio.to_thread(make_sockets, self._paths)

    def _planned(self) -> tuple[WatcherPlan, ...]:
        own_bus = (self._bus_plan(self._bus),) if isinstance(self._bus, NatsServer) else ()
        forkserver = (self._launch.forkserver,) if self._launch.forkserver is not None else ()
        return (*own_bus, *forkserver, *self._launch.services)

    def _bus_plan(self, server: NatsServer) -> WatcherPlan:
        return plan_bus(self._launch.graph.namespace, server.argv, self._paths.root)

    def _service_names(self) -> tuple[str, ...]:
        return tuple(plan.name for plan in self._launch.services)

    async def _enter_state(self, stack: AsyncExitStack, sockets: Sockets, watchers: Sequence[WatcherPlan]) -> None:
        state = new_state(
            self._launch.graph.namespace,
            sockets.circus_endpoint,
            self._launch.inventory.kind,
            this_process(),
            self._environment(),
        )
        for plan in watchers:
            state = claim(state, plan.watcher, role=plan.role, cmd=shlex.join(plan.argv), devices=plan.devices)
        await asyncio.to_thread(self._store.create, state)
        stack.push_async_callback(self._unless_replaced, self._store.remove)
        stack.push_async_callback(self._unless_replaced, self._end_survivors)

    def _environment(self) -> dict[str, str]:
        own = {
            NAMESPACE_ENV: self._launch.graph.namespace,
            STATE_DIR_VARIABLE: str(self._paths.root),
        }
        return recorded_environment(os.environ) | own

    async def _enter_circusd(self, stack: AsyncExitStack, sockets: Sockets) -> CircusRestarts:
        adopt_orphans()
        stack.callback(self._death_pipe.close)
        patience = self._settings.circus_patience
        circusd = await CircusRestarts.start(self._paths, sockets, self._report, patience)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, Reaper(lambda: circusd.pid).look)
        stack.push_async_callback(circusd.end, self._settings.quit_deadline_s)
        return circusd

    # Bring-up, then the steady state.

    async def _operate(
        self, circusd: CircusRestarts, circus: CircusClient, keeper: Restarter, events: EventStream, upkeep: ServerFiles
    ) -> None:
        await circus.statuses()
        self._tasks.spawn("exits", keeper.listen(events))
        self._tasks.spawn("keeper", keeper.run())
        if self._launch.forkserver is not None:
            # First of all, for it takes longest; nothing waits for it but those that are forked from it.
            await circus.add(self._placing().spec(self._launch.forkserver))
        address = await self._bus_address(circus)
        await asyncio.to_thread(write_bus_address, self._paths.bus_file, address)
        bus = await Bus.connect(address, name="supervisor", deadline_s=self._settings.bus_deadline_s)
        try:
            await self._provisions.provide(bus)
            watch = FleetWatch(bus, Subjects(self._launch.graph.namespace))
            progress = Progress(self._service_names(), self._report, keeper.note_ready)
            watch.subscribe(progress.on_change)
            upkeep.members = watch.view.members
            self._keep_cores(watch)
            await watch.start()
            expiry = self._tasks.spawn("fleet", watch.run())
            self._keep_devices(bus)
            placing = self._placing()
            for plan in self._launch.services:
                await circus.add(placing.spec(plan))
            await self._allow_changes(circusd, placing)
            await asyncio.to_thread(upkeep.remember)
            await self._await_ready(progress)
            await expiry
        finally:
            await bus.close()

    def _keep_devices(self, bus: Bus) -> None:
        keeping = DeviceHolding(self._store, self._launch.inventory, self._launch.templates, self._holds)
        self._tasks.spawn("devices", keeping.run(bus, Subjects(self._launch.graph.namespace)))

    def _keep_cores(self, watch: FleetWatch) -> None:
        if self._launch.inventory.kind == "gpu":
            return
        bus = str(Watcher(self._launch.graph.namespace, BUS_SERVICE))
        keeping = CpuAffinity(self._launch.inventory, self._store, watch.view.members, bus)
        watch.subscribe(keeping.on_change)
        self._tasks.spawn("cores", keeping.run())

    async def _bus_address(self, circus: CircusClient) -> BusAddress:
        if isinstance(self._bus, BusAddress):
            self._report.step(f"using the NATS server at {shown_url(self._bus)}")
            return self._bus
        plan = self._bus_plan(self._bus)
        spec = self._placing().spec(plan)
        address, pid = await bring_up(self._bus, spec, circus, self._settings.bus_deadline_s)
        lease = secrets.token_hex(8)
        await asyncio.to_thread(self._store.update, lambda state: set_lease(state, plan.watcher, lease, pid))
        return address

    def _placing(self) -> Placing:
        return Placing(self._paths, self._death_pipe.address, Path.cwd())

    async def _allow_changes(self, circusd: CircusRestarts, placing: Placing) -> None:
        """From now on workers may be added and removed. What is left half done by whoever does so is finished here.
        circusd may die, too."""
        blueprint = Blueprint(
            placing.death_pipe,
            str(placing.working_dir),
            self._launch.inventory,
            self._launch.templates,
            self._settings.ready_deadline_s,
            self._settings.drain_deadline_s,
        )
        await asyncio.to_thread(blueprint.write, self._paths.blueprint_file)
        self._tasks.spawn("janitor", self._janitor.run())
        machinery = {plan.name: plan for plan in self._planned() if plan not in self._launch.services}
        circusd.succession = CircusTakeover(self._store, blueprint, placing, machinery)

    async def _await_ready(self, progress: Progress) -> None:
        try:
            async with asyncio.timeout(self._settings.ready_deadline_s):
                await progress.all_ready.wait()
        except TimeoutError as error:
            raise SupervisorError(
                f"not ready within {self._settings.ready_deadline_s:g} s: {progress.not_ready()}",
                "see `dynamo logs`; a longer --ready-timeout may help",
            ) from error
        root = progress.presence(self._launch.services[-1].name)
        url = root.url if root is not None else None
        if url is None and await asyncio.to_thread(answers, self._launch.http):
            url = self._launch.http.url
        where = "all services ready" if url is None else f"API ready at {url}"
        self._report.say(f"{where} ({progress.summary()})")

    # While it runs.

    def _keeper(self, circus: CircusClient) -> Restarter:
        quiet = {plan.name for plan in self._planned()} - set(self._service_names())
        limits = RestartLimits(max_delay_s=self._settings.restart_delay_max_s)
        expendable = () if self._launch.forkserver is None else (self._launch.forkserver.name,)
        log_of = self._paths.log_file
        return Restarter(
            circus, self._register, log_of, self._report, quiet=quiet, expendable=expendable, limits=limits
        )

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_EVERY_S)
            await asyncio.to_thread(logs.rotate_large, self._paths.logs_dir)

    # The way down.

    async def _drain(self, circusd: CircusRestarts, circus: CircusClient, hurry: asyncio.Event) -> None:
        await self._unless_replaced(lambda: self._paths.blueprint_file.unlink(missing_ok=True))
        deadline_s, registered = self._settings.drain_deadline_s, self._register.pid_of

        def drain(watched: Watched) -> Drain:
            return Drain(watched, self._report, hurry, deadline_s, registered)

        await circusd.stop(drain, circus, stop_order(self._launch.graph))

    async def _unless_replaced(self, remove: Callable[[], object]) -> None:
        """Another server that has taken this one's place has files and processes of the same names."""
        if self._lock.held:
            await asyncio.to_thread(remove)

    def _end_survivors(self) -> None:
        """Whatever has slipped through: a process that left its group, or a child of a killed circusd."""
        processes = ProcFs()
        survivors = leftovers(self._paths, processes.snapshot())
        for stubborn in processes.end(survivors, _SURVIVOR_TERM_S, _SURVIVOR_KILL_S):
            self._report.step(f"process {stubborn.pid} cannot be ended: it may hang in a driver")
