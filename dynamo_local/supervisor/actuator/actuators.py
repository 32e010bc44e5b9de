"""The actuators of a server: what they work with, and the locks at which changes wait for each other."""

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
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.ports import Ports
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.role import RoleWish, change_role
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import Inventory


class BusFleet:
    """The fleet as heard on a bus (ports.Fleet). `watch`: follows all processes, and is run by its owner."""

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
        """An actuator for the workers of that endpoint, or, if it is empty, for the graph's own processes.

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
            change_role=self._change_role,
            report=report,
            clock=time.monotonic,
        )
        return LocalActuator(ports, blueprint, ready_deadline_s, endpoint)

    def is_changing(self, endpoint: str) -> bool:
        """Whether a change of that endpoint's workers, or of the graph's own processes, is under way."""
        lock = self._locks.get(endpoint)
        return lock is not None and lock.locked()

    async def _change_role(self, watcher: str, role: str) -> None:
        await change_role(self.asked, watcher, RoleWish(role, recorded=False))
