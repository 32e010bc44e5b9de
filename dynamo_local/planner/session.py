"""Runs the planner of a running server: connects its loop to bus, statefile, recorders and the server, which carries
out what it decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, follow_address
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.control.client import ControlClient
from dynamo_local.control.errors import absent_server, only_starting, why_absent
from dynamo_local.core.errors import DecodeError, StateError, SupervisorError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.planning.decision import Recorder
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.loop import PlannerLoop
from dynamo_local.planner.metrics import FrontendsWatch, ServerMetrics, StateReader
from dynamo_local.planner.publisher import PlannerPublisher
from dynamo_local.planner.server_orders import ServerOrders
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.tasks import TaskGuard, unless
from state.devices.holding import held
from state.namespaces import find_servers, is_running
from state.paths import StatePaths
from state.record import read_record
from state.statefile.model import State
from state.statefile.store import StateStore
from state.statefile.transitions import taken

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_CONNECT_WITHIN_S = 2.0


@dataclass(frozen=True)
class PlannerSession:
    """The planner of a server. `recorders` is called once the server has been found, so that a planner without
    one writes no files. `watcher`: the planner's own as a service of the graph; empty for `dynamo planner`."""

    paths: StatePaths
    options: PlannerOptions
    recorders: Callable[[], Sequence[Recorder]]
    watcher: str = ""

    async def run(self, bus: Bus, tasks: TaskGuard) -> None:
        """Plan until cancelled. Side tasks are spawned in `tasks`. A service waits until all of the server has been
        ready once, and for another acting planner to end. For `dynamo planner` both are errors; one that only observes
        needs a server whose processes are registered.

        Raises NotRunningError when the server has ended; without `watcher` also UsageError, SupervisorError, and
        ConfigError if the running workers hold more devices than the budget has.
        """
        blueprint = await self._blueprint()
        subjects = Subjects(self.paths.namespace)
        watch = FleetWatch(bus, subjects, everywhere=True)
        await watch.start()
        tasks.spawn("fleet", watch.run())
        reports = PlannerPublisher(bus, subjects, self.options, self.watcher)
        tasks.spawn("planner reports", reports.run())
        state = StateReader(StateStore(self.paths), partial(usable_devices_now, self.paths, blueprint))
        templates = {template.role: template.service for template in reversed(blueprint.workers_of(FIRST_OF_MAIN))}
        if not self.watcher:
            found = await state.read()
            self.options.check_fits(0 if found is None else found.devices)
        frontends = FrontendsWatch(bus, subjects)
        await frontends.start()
        server = ServerOrders(ControlClient(self.paths), self.options.change_timeout)
        recorders = (reports, *self.recorders())
        metrics = ServerMetrics(bus, subjects, watch, frontends, state, templates)
        planner = PlannerLoop(self.options, metrics.pull, server.take_action, server.scale, recorders)
        try:
            if not self.options.no_operation:
                await server.begin_planning(waits=bool(self.watcher))
            await self._follow_server(bus, subjects, recorders)
            if templates:
                _log.info("%s", self._introduced())
            await planner.run()
        finally:
            for recorder in recorders:
                recorder.close()

    async def _follow_server(self, bus: Bus, subjects: Subjects, recorders: Sequence[Recorder]) -> None:
        """Have recorders note what the server does to endpoints by itself: parks, wakes, swaps of devices."""

        async def on_change(event: Event) -> None:
            for recorder in recorders:
                recorder.changed(event)

        # An observing planner would repeat it in the file of the one that acts.
        if not self.options.no_operation or self.options.log_dir is not None:
            await bus.listen(subjects.endpoint_changes, Event, on_change)

    def _introduced(self) -> str:
        options = self.options
        acts = "observing only, nothing will be changed" if options.no_operation else "adding and removing workers"
        return (
            f"planning for namespace {self.paths.namespace} by policy {options.policy}, "
            f"a decision every {options.adjustment_interval:g} s: {acts}"
        )

    async def _blueprint(self) -> Blueprint:
        while True:
            try:
                blueprint = await asyncio.to_thread(Blueprint.read, self.paths)
            except SupervisorError:
                if not self.watcher:
                    raise
            else:
                if await asyncio.to_thread(self._may_begin):
                    return blueprint
            await asyncio.sleep(_LOOK_EVERY_S)

    def _may_begin(self) -> bool:
        """Whether all of the server has been ready once. Before, its first workers may not have come: others would be
        added in their place, and one that was removed would be waited for. Raises SupervisorError by hand."""
        record = read_record(self.paths)
        if self.watcher:
            return record is not None and record.phase == "running"
        if not self.options.no_operation and record is not None and record.phase == "starting":
            raise only_starting(self.paths.namespace)
        return True


def usable_devices_now(paths: StatePaths, blueprint: Blueprint, state: State) -> int:
    """As `usable_devices`, by the blueprint as it is now where the devices are a cluster's. Blocks for milliseconds."""
    if blueprint.clustered:
        # As it was at first, if the server is about to end.
        with suppress(SupervisorError, StateError, DecodeError):
            blueprint = Blueprint.read(paths)
    return usable_devices(blueprint, state)


def usable_devices(blueprint: Blueprint, state: State) -> int:
    """Return the number of devices that the server's workers hold or may take. Devices of other servers
    do not count, except where no worker computes."""
    if blueprint.clustered:
        return int(blueprint.device_count)
    devices = len(blueprint.inventory.devices)
    own = blueprint.workers_of(FIRST_OF_MAIN)
    if own and all(template.virtual for template in own):
        return devices
    return devices - len(held(blueprint.inventory, taken(state)))


async def plan_by_hand(planning: PlannerSession, stop: asyncio.Event) -> None:
    """Run a planner beside the server until `stop` is set. Raises as `PlannerSession.run` does."""
    async with bus_of(planning.paths, "planner") as bus:
        tasks = TaskGuard()
        try:
            tasks.spawn("planner", planning.run(bus, tasks))
            await unless(stop.wait(), tasks.failed())
        finally:
            await tasks.close()


@asynccontextmanager
async def bus_of(paths: StatePaths, name: str) -> AsyncIterator[Bus]:
    """Connect to the bus of the namespace's server, as a client called `name`.

    Raises NotRunningError when no server runs, SupervisorError when it is only starting or is stopping, BusError when
    the bus does not answer.
    """
    if not await asyncio.to_thread(is_running, paths):
        raise absent_server(paths.namespace, await asyncio.to_thread(find_servers, paths.root))
    if not await asyncio.to_thread(paths.bus_file.exists):
        raise why_absent(paths)
    address = await asyncio.to_thread(BusAddress.load, paths.bus_file)
    bus = await Bus.connect(address, name=name, deadline_s=_CONNECT_WITHIN_S, file=paths.bus_file)
    try:
        await follow_address(bus, Subjects(paths.namespace))
        yield bus
    finally:
        await bus.close()
