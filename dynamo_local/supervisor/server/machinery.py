"""The processes of one machine, and what keeps them: of a server on its machine, or of a node server on its node.

It has no bus of its own, and decides neither what is started first nor what is changed: that is up to its owner.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import BUS_SERVICE, Watcher
from dynamo_local.core.process.restarts import RestartLimits
from dynamo_local.process.ancestry import DeathPipe, adopt_orphans
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.circus.client import CircusClient, EventStream
from dynamo_local.supervisor.circus.daemon import CircusRestarts, CircusTakeover
from dynamo_local.supervisor.circus.drain import Drain, Watched
from dynamo_local.supervisor.circus.process_registry import Registration, StateRegistry
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.places.local import Books, CircusWatchers, LocalPlaces
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.plan import Launch, main_on_board
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from dynamo_local.supervisor.server.nats.nats_server import NatsServer
from dynamo_local.supervisor.server.reports.event_sources import ServerEvents
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.run_directory import RunDirectory
from dynamo_local.supervisor.server.settings import ServerSettings
from dynamo_local.supervisor.upkeep.cpu_affinity import CpuAffinity
from dynamo_local.supervisor.upkeep.devices import DeviceHolding, DeviceHolds
from dynamo_local.supervisor.upkeep.files import DiskUpkeep, ServerFiles
from dynamo_local.supervisor.upkeep.orphans import Reaper
from dynamo_local.supervisor.upkeep.restarter import Restarter
from dynamo_local.tasks import TaskGuard, unless
from state.devices.allocation import Inventory
from state.locks import ServerLock
from state.machine.identity import machine_id
from state.paths import Sockets
from state.record import ServerRecord
from state.statefile.store import StateStore


@dataclass(eq=False, repr=False)
class Machinery:
    """Run directory, statefile, circusd, and the tasks that keep them. Methods are called in the order below.

    The caller holds the namespace's server lock and the devices, and has cleared leftovers. `circus` exists once
    `start` has returned, `restarter` and `files` once `keep` has, `registration` once `follow` has. `tasks`: all
    background tasks of the owner. `ahead`: a circusd that was started ahead, on this thread. `all_expendable`: see
    Restarter.
    """

    launch: Launch
    settings: ServerSettings
    report: Report
    lock: ServerLock
    holds: DeviceHolds
    ahead: CircusAhead | None = None
    all_expendable: bool = False
    blueprint: BlueprintFile = field(init=False)
    store: StateStore = field(init=False)
    directory: RunDirectory = field(init=False)
    registry: StateRegistry = field(init=False)
    events: ServerEvents = field(init=False)
    specs: WatcherSpecs = field(init=False)
    tasks: TaskGuard = field(default_factory=TaskGuard, init=False)
    _death_pipe: DeathPipe = field(default_factory=DeathPipe, init=False)
    circus: CircusClient = field(init=False)
    restarter: Restarter = field(init=False)
    files: ServerFiles = field(init=False)
    registration: Registration = field(init=False)
    _circusd: CircusRestarts = field(init=False)
    _listened: EventStream = field(init=False)
    _holding: DeviceHolding = field(init=False)
    sockets: Sockets = field(init=False)

    def __post_init__(self) -> None:
        paths = self.launch.paths
        self.blueprint = BlueprintFile(paths)
        self.store = StateStore(paths)
        self.directory = RunDirectory(self.launch, self.store, self.lock, self.report)
        self.registry = StateRegistry(self.store)
        self.events = ServerEvents(paths, self.report)
        self.specs = WatcherSpecs(paths, self._death_pipe.address, Path.cwd())

    async def make_files(
        self, stack: AsyncExitStack, bus: NatsServer | BusAddress, plans: Sequence[WatcherPlan]
    ) -> None:
        """Make the run directory and the statefile, with a claim for each of the watchers to start with."""
        self.sockets = await self.directory.create(stack, bus)
        stack.enter_context(self.events.of_server(self.launch.graph.target))
        await self.directory.create_state(stack, self.sockets, plans)

    async def start(self, stack: AsyncExitStack) -> None:
        """Start circusd, and connect to it."""
        adopt_orphans()
        stack.callback(self._death_pipe.close)
        self._circusd = circusd = CircusRestarts.start(
            self.launch.paths, self.sockets, self.report, self.settings.circus_deadlines, self.ahead
        )
        circusd.record = self.events.record
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, Reaper(lambda: circusd.pid).look)
        stack.push_async_callback(circusd.end, self.settings.quit_deadline_s)
        self.circus = await stack.enter_async_context(circusd.client())
        self._listened = await stack.enter_async_context(EventStream(self.sockets.circus_pubsub_endpoint))

    def keep(
        self,
        plans: Iterable[WatcherPlan],
        *,
        on_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Begin to keep files, circusd and the disk in order. `plans`: the watchers to start with."""
        self.restarter = self._restarter(plans)
        self.files = ServerFiles(
            self.store,
            self.sockets,
            self.lock,
            self.report,
            revisions=lambda: {
                *self.blueprint.revisions(),
                *(each.revision for each in main_on_board(self.launch.graph)),
            },
            on_unreachable=self._circusd.renew,
        )
        self.tasks.spawn("files", self.files.run())
        self.tasks.spawn("circusd", self._circusd.run())
        self.tasks.spawn("disk", DiskUpkeep(self.launch.paths, self.report, self.events.flush, on_room).run())

    async def begin(self) -> None:
        """Begin to restart what ends, as soon as circusd answers, and start the fork server."""
        await self.circus.statuses()
        self.tasks.spawn("exits", self.restarter.listen(self._listened))
        self.tasks.spawn("restarter", self.restarter.run())
        if self.launch.forkserver is not None:
            # First of all, for it takes longest; only the services that are forked from it wait for it.
            await self.add(self.launch.forkserver)

    def follow(self, watch: FleetWatch) -> None:
        """Have the statefile and cores follow the fleet, which the caller starts."""
        self.registration = Registration(self.store, watch.view.members, self.report)
        watch.subscribe(self.registration.on_change)
        self.tasks.spawn("registration", self.registration.run())
        if self.launch.inventory.kind == "gpu":
            return

        def members_here() -> list[Presence]:
            # The pids of other machines are those of strangers.
            return [presence for presence in watch.view.members() if presence.machine == machine_id()]

        bus = str(Watcher(self.launch.graph.namespace, BUS_SERVICE))
        affinity = CpuAffinity(self.launch.inventory, self.registration, members_here, bus)
        watch.subscribe(affinity.on_change)
        self.tasks.spawn("cores", affinity.run())

    def hold_devices(self) -> None:
        """Begin to hold the devices that the statefile says are in use."""
        launch, on_claims = self.launch, self.events.devices.on_state
        self._holding = DeviceHolding(self.store, launch.inventory, self._templates, self.holds, on_claims)
        self.tasks.spawn("devices", self._holding.run())

    def place(self, inventory: Inventory, circus: CircusClient, report: Report) -> LocalPlaces:
        """This machine as a place, once devices are held. `circus`: asks circusd. `report`: of what is done there."""
        watchers = CircusWatchers(circus, self.specs, self.registry.pid_of, report)
        return LocalPlaces(Books(self.store), inventory, self._holding, watchers, self.launch.paths.log_file)

    async def add(self, plan: WatcherPlan) -> None:
        """Register and start a watcher."""
        await self.circus.add(self.specs.of(plan))

    async def allow_changes(self, machinery: Iterable[WatcherPlan]) -> None:
        """Allow that workers are added and removed, and that circusd dies and is replaced. `machinery`: the watchers
        that are no service of the graph."""
        blueprint = Blueprint(
            self.specs.death_pipe,
            str(self.specs.working_dir),
            self.launch.inventory,
            self.launch.templates,
            self.settings.ready_deadline_s,
            self.settings.drain_deadline_s,
            0 if self.launch.clustered else None,
        )
        await asyncio.to_thread(self.blueprint.write, blueprint)
        own = {plan.name: plan for plan in machinery}
        self._circusd.takeover = CircusTakeover(self.store, self.blueprint.current, self.specs, own)

    async def until(self, wanted: asyncio.Event) -> None:
        """Wait for the event, or raise the error that a task failed with."""
        await unless(wanted.wait(), self.tasks.failed())

    async def drain(
        self,
        order: Sequence[Collection[str]],
        hurry: asyncio.Event,
        after_first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Stop all watchers in that order, then circusd. Call when `tasks` are closed. `after_first`: see Drain."""
        await self.directory.note(ServerRecord("stopping"))
        await self.directory.forbid_changes(self.blueprint)
        deadline_s, registered = self.settings.drain_deadline_s, self.registry.pid_of

        def drain(watched: Watched) -> Drain:
            return Drain(watched, self.report, hurry, deadline_s, registered, after_first)

        await self._circusd.stop(drain, self.circus, order)

    def _templates(self) -> tuple[ServiceTemplate, ...]:
        return (*self.launch.templates, *self.blueprint.of_revisions())

    def _restarter(self, plans: Iterable[WatcherPlan]) -> Restarter:
        services = {plan.name for plan in self.launch.services}
        expendable = () if self.launch.forkserver is None else (self.launch.forkserver.name,)
        return Restarter(
            *(self.circus, self.registry, self.launch.paths.log_file, self.report),
            quiet={plan.name for plan in plans} - services,
            expendable=expendable,
            all_expendable=self.all_expendable,
            limits=RestartLimits(max_delay_s=self.settings.restart_delay_max_s),
            record=self.events.record,
        )
