"""The actuators of a server: what they work with, the locks at which changes wait for each other, and the reconciler,
which finishes changes that were left half done, by orders that have failed or were cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.changes import Ports
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.watchers import RoleWish, change_role
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.places.local import Books
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.devices.allocation import Inventory
from state.statefile.model import State


class BusFleet:
    """The fleet as heard on a bus (changes.Fleet). `watch`: follows all processes, and is run by its owner."""

    def __init__(self, bus: Bus, namespace: str, watch: FleetWatch) -> None:
        self._bus = bus
        self._namespace = namespace
        self._view = watch.view
        self._changed = asyncio.Event()
        watch.subscribe(lambda _: self._changed.set())

    def is_ready(self, lease: str) -> bool:
        presence = self._view.get(lease)
        return presence is not None and presence in self._view.ready((presence.role,))

    async def revoke(self, lease: str, revision: str) -> None:
        await self._bus.send(Subjects(self._namespace, revision).revoked, LeaseRevoked(lease))
        await self._bus.flush()

    async def changed(self, within_s: float) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()


@dataclass(frozen=True)
class Actuators:
    """Makes the actuators of one server.

    `circus`: a client with a deadline: a change fails while circusd is silent. `cluster`: the places of workers that
    live on the nodes of a cluster; None if all processes live on this machine.
    """

    machinery: Machinery
    circus: CircusClient
    fleet: BusFleet
    asked: AskedServer
    cluster: Places | None
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)
    """By endpoint, as long as there is an actuator of it."""

    async def of(
        self,
        endpoint: str,
        report: Report,
        *,
        ready_deadline_s: float | None = None,
        gone: Callable[[Inventory], Mapping[int, str]] | None = None,
    ) -> LocalActuator:
        """An actuator for the workers of that endpoint, or, if it is empty, for processes that are no workers.

        `ready_deadline_s`: for a worker that is added; the server's own by default. `gone`: asked once for the devices
        that are not there any more, which no worker gets.
        """
        blueprint = await asyncio.to_thread(self.machinery.blueprint.current)
        if gone is not None:
            found = await asyncio.to_thread(gone, blueprint.inventory)
            blueprint = msgspec.structs.replace(blueprint, inventory=blueprint.inventory.lacking(found))
        ports = Ports(
            namespace=self.asked.paths.namespace,
            books=Books(self.machinery.store),
            places=self.cluster or self.machinery.place(blueprint.inventory, self.circus, report),
            fleet=self.fleet,
            lock=self._locks.setdefault(endpoint, asyncio.Lock()),
            change_role=lambda watcher, role: change_role(self.asked, watcher, RoleWish(role, recorded=False)),
            report=report,
            clock=time.monotonic,
        )
        return LocalActuator(ports, blueprint, ready_deadline_s, endpoint)

    def is_changing(self, endpoint: str) -> bool:
        """Whether a change of that endpoint's workers, or of processes that are no workers, is under way."""
        lock = self._locks.get(endpoint)
        return lock is not None and lock.locked()


_EVERY_S = 1.0


@dataclass
class Reconciler:
    """Finishes the changes of one server: those of each endpoint's workers and of other processes at the same time."""

    actuators: Actuators
    report: Report
    _due: set[str] = field(default_factory=set, init=False)
    """The endpoints, "" for processes that are no workers, that are to be reconciled whatever the statefile shows."""
    _requested: bool = field(default=False, init=False)
    """Whether all are to be."""
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _failures: dict[str, ReportOnce] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Reconcile whenever the statefile shows a change under way, or it was requested, until cancelled."""
        store = self.actuators.machinery.store
        try:
            while True:
                await asyncio.sleep(until_beat(time.monotonic(), _EVERY_S))
                try:
                    state = await asyncio.to_thread(store.read)
                except (NotRunningError, StateError):
                    # The server repairs its statefile, and reports it (supervisor/upkeep/files.py).
                    continue
                await self._begin(state)
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def request(self) -> None:
        """Have the next round reconcile whatever the statefile shows. For a statefile that may be out of date."""
        self._requested = True

    async def reconcile(self, endpoint: str) -> None:
        """Finish the changes that nobody works on, of that endpoint's workers or, if it is empty, of other processes.
        Where a change is under way, nothing is done: whoever makes it has finished what was left, or the next round
        does."""
        try:
            actuator = await self.actuators.of(endpoint, self.report)
            if self.actuators.is_changing(endpoint):
                return
            # First: it may become due again meanwhile.
            self._due.discard(endpoint)
            for note in await actuator.reconcile():
                self.report.step(note)
            self._failures.pop(endpoint, None)
        except DynamoError as error:
            # The bus may be restarting, for example. The next round tries again.
            self._due.add(endpoint)
            failure = self._failures.setdefault(endpoint, ReportOnce(self.report))
            failure.note(f"a change is left unfinished for now: {error}")

    async def _begin(self, state: State) -> None:
        """Begin to reconcile where it is due and not under way: an endpoint whose workers start for long holds up no
        other."""
        if self._requested:
            self._requested = False
            self._due |= await asyncio.to_thread(self._all, state)
        phases = {endpoint_of(c.revision) for c in state.components.values() if c.phase is not None}
        for endpoint in [endpoint for endpoint, task in self._under_way.items() if task.done()]:
            self._under_way.pop(endpoint).result()
        for endpoint in sorted((phases | self._due) - self._under_way.keys()):
            # Most changes that the statefile shows are under way.
            if not self.actuators.is_changing(endpoint):
                name = f"reconciling {endpoint or 'the graph'}"
                self._under_way[endpoint] = asyncio.create_task(self.reconcile(endpoint), name=name)

    def _all(self, state: State) -> set[str]:
        # An endpoint may have lost its claims with the statefile that was damaged.
        revisions = {component.revision for component in state.components.values()}
        return {"", *map(endpoint_of, revisions | self.actuators.machinery.blueprint.revisions())}
