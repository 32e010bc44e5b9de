"""The actuator of a running server, with everything around it: circus, bus, statefile, the lock on changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.names import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.change_lock import turn_at
from dynamo_local.supervisor.actuator.ports import Ports
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.admin.role import change_role
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.process_registry import StateRegistry
from dynamo_local.supervisor.circus.silence import CircusSilence
from dynamo_local.supervisor.circus.watchers import CircusWatchers, Placing
from dynamo_local.supervisor.server.blueprint import Blueprint, check_reachable, why_absent
from dynamo_local.supervisor.server.report import Report
from dynamo_local.supervisor.upkeep.devices import ask_to_hold
from dynamo_local.tasks import TaskGuard
from state.devices import Inventory
from state.holding import held_elsewhere
from state.locks import LockTimeoutError
from state.paths import StatePaths
from state.store import StateStore

_RETRY_S = 0.1
_CIRCUS_DEADLINE_S = 30.0
"""For a circusd that is starved, or being started again."""


@asynccontextmanager
async def open_actuator(
    paths: StatePaths, report: Report, *, ready_deadline_s: float | None = None, patience_s: float | None = None
) -> AsyncIterator[LocalActuator]:
    """The actuator of the namespace's server.

    `ready_deadline_s`: for a worker that is added, the server's own by default. `patience_s`: how long to wait while
    somebody else changes what runs, by default as long as any one change may take. Raises NotRunningError when no
    server runs, SupervisorError when it is only starting or is ending.
    """
    async with bus_of(paths, "actuator") as bus:
        blueprint = await asyncio.to_thread(Blueprint.read, paths.blueprint_file)
        if patience_s is None:
            patience_s = blueprint.ready_deadline_s + blueprint.drain_deadline_s
        store = StateStore(paths)
        state = await asyncio.to_thread(store.read)
        await asyncio.to_thread(check_reachable, paths, state)
        fleet = BusFleet(bus, Subjects(paths.namespace))
        devices = MachineDevices(bus, Subjects(paths.namespace), blueprint.inventory, state.owner.pid)
        placing = Placing(paths, blueprint.death_pipe, Path(blueprint.working_dir))
        circusd = CircusClient(state.circus_endpoint, deadline_s=_CIRCUS_DEADLINE_S, silence=CircusSilence(report))
        async with circusd as circus, fleet.watched():
            world = Ports(
                books=store,
                devices=devices,
                watchers=CircusWatchers(circus, placing, StateRegistry(store).pid_of, report),
                fleet=fleet,
                turn=partial(taking_turns, paths, patience_s, report),
                check=partial(check_changeable, paths),
                switch=partial(change_role, paths),
                log_of=paths.log_file,
                report=report,
                clock=time.monotonic,
            )
            yield LocalActuator(world, blueprint, ready_deadline_s)


@dataclass(frozen=True)
class MachineDevices:
    """The actuator's devices (actuator_ports.Devices). `server`: pid of ours."""

    bus: Bus
    subjects: Subjects
    inventory: Inventory
    server: int

    async def elsewhere(self) -> Mapping[int, str]:
        found = await asyncio.to_thread(held_elsewhere, self.inventory, self.server)
        return {device_id: str(holder) for device_id, holder in found.items()}

    async def settle(self) -> Mapping[int, str]:
        return await ask_to_hold(self.bus, self.subjects)


class BusFleet:
    """The actuator's fleet (actuator_ports.Fleet) on a bus."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._revoked = subjects.revoked
        self._watch = FleetWatch(bus, subjects)
        self._changed = asyncio.Event()
        self._watch.subscribe(lambda _: self._changed.set())

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Hear of the fleet for as long as the context lasts."""
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

    async def revoke(self, lease: str) -> None:
        await self._bus.send(self._revoked, LeaseRevoked(lease))
        await self._bus.flush()

    async def changed(self, within_s: float) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)


@asynccontextmanager
async def taking_turns(
    paths: StatePaths, patience_s: float, report: Report, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[None]:
    """Be the only one who changes what runs. The kernel ends it when the process dies.

    Raises LockTimeoutError when it is somebody else's turn for longer than `patience_s`.
    """
    check_changeable(paths)
    give_up_at = clock() + patience_s

    def busy(error: LockTimeoutError, first: bool) -> None:
        if clock() >= give_up_at:
            raise error
        if first:
            report.step(f"waiting for a change that process {error.holder} makes")
        check_changeable(paths)

    async with turn_at(paths.changes_lock, _RETRY_S, busy):
        # It may have ended meanwhile.
        check_changeable(paths)
        yield


def check_changeable(paths: StatePaths) -> None:
    """Raise SupervisorError unless the server is up and not ending."""
    if not paths.blueprint_file.exists():
        raise why_absent(paths)
