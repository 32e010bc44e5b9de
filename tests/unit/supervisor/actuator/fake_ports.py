"""The actuator's ports without processes or time. A test can kill the actuator between any two steps, and check the
state at each."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dynamo_local.core.errors import BusError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import FIRST_OF_MAIN, HTTP_PORT_ENV, MAIN, parse_watcher
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.changes import Ports
from dynamo_local.supervisor.circus.client import ACTIVE, STOPPED
from dynamo_local.supervisor.places.local import Books, LocalPlaces
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from state.devices.allocation import cpu_slots
from state.statefile.model import State
from state.statefile.transitions import claim, taken
from tests.unit.state.builders import empty_state, with_process
from tests.unit.supervisor.recording import RecordingReport

READY_S = 10.0
Start = Literal["well", "dies", "hangs"]


class Killed(BaseException):
    """The process that runs the actuator was killed. No handler but the test's may catch this."""


def template(service: str, role: str, devices: int = 1, revision: str = "") -> ServiceTemplate:
    revision = revision or (FIRST_OF_MAIN if role in ENGINE_ROLES else "")
    return ServiceTemplate(service, role, ("run", service), {"KEEP": "me"}, devices, 1, revision=revision)


def revision_of(watcher: str) -> str:
    """The revision that a watcher's name stands for, in a graph with such a blueprint."""
    return parse_watcher(watcher).revision or (FIRST_OF_MAIN if "Worker" in watcher else "")


def blueprint(slots: int = 4, devices: int = 1) -> Blueprint:
    """A graph with decode workers that hold so many devices, and prefill workers that hold one."""
    templates = (
        template("VllmWorker", "decode", devices),
        template("PrefillWorker", "prefill"),
        template("Router", "router", 0),
        ServiceTemplate("Frontend", "frontend", ("run", "Frontend"), {HTTP_PORT_ENV: "8000"}, 0, 1),
    )
    return Blueprint("77:3:1", "/", cpu_slots(range(slots), slots), templates, READY_S, 30.0)


@dataclass
class FakeProcess:
    start: Start
    devices: tuple[int, ...]
    lease: str | None = None


class BooksWithoutThreads(Books):
    """The same steps in the same order each time, also of changes that are made side by side."""

    async def read(self) -> State:
        await asyncio.sleep(0)
        return self.store.read()

    async def update(self, change: Callable[[State], State]) -> State:
        await asyncio.sleep(0)
        return self.store.update(change)


@dataclass
class FakePorts:
    """Statefile, circus, bus and devices in memory. `dies_after`: steps until the actuator's process is killed; None:
    never. `checks`: called at each step."""

    state: State = field(default_factory=empty_state)
    watchers: dict[str, str] = field(default_factory=dict)
    processes: dict[str, FakeProcess] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)
    start: Start = "well"
    starts: dict[str, Start] = field(default_factory=dict)
    """How the processes of some watchers start, where not as `start` says."""
    bus_is_up: bool = True
    dies_after: int | None = None
    checks: list[Callable[[], None]] = field(default_factory=list)
    now: float = 0.0
    leases: int = 0
    others: dict[int, str] = field(default_factory=dict)
    """Devices that others hold, visibly."""
    faster: dict[int, str] = field(default_factory=dict)
    """Devices that others take before our server does."""
    held: frozenset[int] = frozenset()
    ended: list[tuple[str, float, bool]] = field(default_factory=list)
    """Watcher, deadline, and whether its lease had been revoked by then."""
    report: RecordingReport = field(default_factory=RecordingReport)
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By endpoint."""

    def running(self, service: str, role: str, *devices: int) -> None:
        """Put a process there as `dynamo serve` does."""
        name = f"dynamo_{service}"
        self.state = claim(self.state, name, role=role, cmd=f"run {service}", devices=devices)
        self.watchers[name] = ACTIVE
        self.processes[name] = FakeProcess("well", devices)
        self.held = taken(self.state)
        self.progress()

    def step(self) -> None:
        for check in self.checks:
            check()
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise Killed
            self.dies_after -= 1

    def progress(self) -> None:
        """Processes that start well say that they are ready."""
        for name, process in self.processes.items():
            if process.start == "well" and process.lease is None:
                self.leases += 1
                process.lease = f"lease-{self.leases}"
                self.state = with_process(self.state, name, process.lease, 1000 + self.leases)

    def actuator(self, plan: Blueprint, endpoint: str = MAIN) -> LocalActuator:
        books = BooksWithoutThreads(self)
        ports = Ports(
            namespace="dynamo",
            books=books,
            places=LocalPlaces(books, plan.inventory, self, self, lambda name: Path("/nonexistent") / name),
            fleet=self,
            lock=self.locks[endpoint],
            change_role=self.change_role,
            report=self.report,
            clock=lambda: self.now,
        )
        return LocalActuator(ports, plan, endpoint=endpoint)

    # The statefile

    def read(self) -> State:
        self.step()
        return self.state

    def update(self, change: Callable[[State], State]) -> State:
        self.step()
        self.state = after = change(self.state)
        self.step()
        return after

    # The machine

    async def elsewhere(self) -> Mapping[int, str]:
        self.step()
        return dict(self.others)

    async def hold_claimed(self) -> Mapping[int, str]:
        self.step()
        self.held = taken(self.state)
        return {device: self.faster[device] for device in self.held if device in self.faster}

    # circus

    async def statuses(self) -> Mapping[str, str]:
        self.step()
        return dict(self.watchers)

    async def add(self, plan: WatcherPlan) -> None:
        self.step()
        if plan.name not in self.watchers:
            assert plan.environment["KEEP"] == "me"
            self.watchers[plan.name] = ACTIVE
            start = self.starts.get(plan.name, self.start)
            self.processes[plan.name] = FakeProcess(start, plan.devices)
            if start == "dies":
                self._exit(plan.name)
        self.step()
        # Changes that are made at the same time take turns.
        await asyncio.sleep(0)

    async def end(self, name: str, deadline_s: float) -> None:
        self.step()
        if name in self.processes:
            self.ended.append((name, deadline_s, self.processes[name].lease in self.revoked))
            self._exit(name)
        self.step()

    async def remove(self, name: str) -> None:
        self.step()
        assert name not in self.processes, "circus would block while it stops the process"
        self.watchers.pop(name, None)
        self.step()

    def _exit(self, name: str) -> None:
        del self.processes[name]
        self.watchers[name] = STOPPED

    # The bus

    def is_ready(self, lease: str) -> bool:
        return lease not in self.revoked and any(process.lease == lease for process in self.processes.values())

    async def revoke(self, lease: str, revision: str) -> None:
        self.step()
        if not self.bus_is_up:
            raise BusError("the bus is down")
        assert all(c.lease != lease or c.revision == revision for c in self.state.components.values())
        self.revoked.add(lease)
        self.step()
        await asyncio.sleep(0)

    async def changed(self, within_s: float) -> None:
        self.step()
        self.now += within_s
        await asyncio.sleep(0)
        self.progress()

    async def change_role(self, watcher: str, role: str) -> None:
        self.step()
        raise UsageError(f"{watcher} stays in the role decode: not today")
