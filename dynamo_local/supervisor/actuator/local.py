"""Opens the actuator of a running server: connects it to circus, the bus, the statefile and the lock on changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.parts import BusPart
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import CHANGE_ROLE
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.change_lock import change_lock, check_changeable
from dynamo_local.supervisor.actuator.ports import Ports
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.process_registry import StateRegistry
from dynamo_local.supervisor.circus.silence import CircusSilence
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.far import places_of_graph
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.machine import CircusWatchers, MachineDevices
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, check_reachable
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import Inventory
from state.paths import StatePaths
from state.statefile.store import StateStore

_CIRCUS_DEADLINE_S = 30.0
"""Long enough for a circusd that other programs starve, or that is being replaced."""


@asynccontextmanager
async def open_actuator(
    paths: StatePaths,
    report: Report,
    *,
    endpoint: str = "",
    ready_deadline_s: float | None = None,
    lock_wait_s: float | None = None,
    bus: Bus | None = None,
    gone: Callable[[Inventory], Mapping[int, str]] | None = None,
) -> AsyncIterator[LocalActuator]:
    """The actuator of the namespace's server.

    `endpoint`: whose workers are changed; empty for the graph's own processes. `ready_deadline_s`: for a worker that is
    added; the server's own by default. `lock_wait_s`: how long to wait while another process changes them; by default
    as long as any one change may take. `bus`: a connection that the caller has; by default one is made. `gone`: asked
    once for the devices that are not there any more, which no worker gets. Raises NotRunningError when no server runs,
    SupervisorError when it is only starting or is stopping.
    """
    async with _connected(paths, bus) as bus:
        blueprint = await asyncio.to_thread(Blueprint.read, paths)
        if gone is not None:
            found = await asyncio.to_thread(gone, blueprint.inventory)
            blueprint = msgspec.structs.replace(blueprint, inventory=blueprint.inventory.lacking(found))
        if lock_wait_s is None:
            lock_wait_s = blueprint.ready_deadline_s + blueprint.drain_deadline_s
        store = StateStore(paths)
        state = await asyncio.to_thread(store.read)
        subjects = Subjects(paths.namespace)
        await asyncio.to_thread(check_reachable, paths, state)
        fleet = BusFleet(bus, paths.namespace, everywhere=bool(endpoint))
        books = Books(store)
        devices = MachineDevices(bus, subjects, blueprint.inventory, state.owner.pid)
        specs = WatcherSpecs(paths, blueprint.death_pipe, Path(blueprint.working_dir))
        circusd = CircusClient(state.circus_endpoint, deadline_s=_CIRCUS_DEADLINE_S, silence=CircusSilence(report))
        async with circusd as circus, fleet.watched():
            watchers = CircusWatchers(circus, specs, StateRegistry(store).pid_of, report)
            local = LocalPlaces(books, blueprint.inventory, devices, watchers, paths.log_file)
            ports = Ports(
                namespace=paths.namespace,
                books=books,
                places=places_of_graph(bus, paths) if blueprint.clustered else local,
                fleet=fleet,
                change_lock=partial(change_lock, paths, lock_wait_s, report, endpoint),
                check_changeable=partial(check_changeable, paths),
                change_role=partial(_change_role, paths),
                report=report,
                clock=time.monotonic,
            )
            yield LocalActuator(ports, blueprint, ready_deadline_s, endpoint)


@asynccontextmanager
async def _connected(paths: StatePaths, bus: Bus | None) -> AsyncIterator[Bus]:
    if bus is None:
        async with bus_of(paths, "actuator") as own:
            yield own
        return
    part = BusPart(bus)
    try:
        yield part
    finally:
        await part.close()


async def _change_role(paths: StatePaths, watcher: str, role: str) -> None:
    """Have the server change the role of a worker. The event is the caller's. Raises UsageError if it cannot be."""
    wish = {"role": role, "recorded": False}
    await asyncio.to_thread(ControlClient(paths).do, CHANGE_ROLE, wish, watcher=watcher)


class BusFleet:
    """The fleet as heard on a bus (ports.Fleet). `everywhere`: with the workers of endpoints."""

    def __init__(self, bus: Bus, namespace: str, *, everywhere: bool) -> None:
        self._bus = bus
        self._namespace = namespace
        self._watch = FleetWatch(bus, Subjects(namespace), everywhere=everywhere)
        self._changed = asyncio.Event()
        self._watch.subscribe(lambda _: self._changed.set())

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow presences for the time of the context."""
        tasks = TaskGuard()
        await self._watch.start()
        tasks.spawn("fleet", self._watch.run())
        try:
            yield
        finally:
            await tasks.close()

    def is_ready(self, lease: str) -> bool:
        presence = self._watch.view.get(lease)
        return presence is not None and presence in self._watch.view.ready((presence.role,))

    async def revoke(self, lease: str, revision: str) -> None:
        await self._bus.send(Subjects(self._namespace, revision).revoked, LeaseRevoked(lease))
        await self._bus.flush()

    async def changed(self, within_s: float) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()
