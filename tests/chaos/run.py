"""A run on mockers, from the start of the server to the check that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.rpc import CallClient
from dynamo_local.core.errors import BusError, DynamoError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from state.paths import Sockets
from tests.chaos.faults import STALL_TIMEOUT_S, WEIGHTS, Done
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.graph import Router
from tests.chaos.injector import ALL_ROLES, BUS, FIRST_PREFILL_WORKER, FIRST_WORKER, ROUTER, Injector, Rules
from tests.chaos.leftovers import SharedMemoryWatch, block_memories, files_left
from tests.chaos.logged_errors import errors_in_logs, errors_logged_here
from tests.chaos.machinery import Machinery, clock_for, machinery_of
from tests.chaos.memory import EVERY_S, MemoryWatch
from tests.chaos.migrations import RandomMigrations
from tests.chaos.processes import ServerProcesses, descendants
from tests.chaos.report import Report
from tests.chaos.role_switch import RoleSwitch
from tests.chaos.settings import BLOCK_SIZE, NAMESPACE, ChaosSettings
from tests.chaos.tcp_proxy import TcpProxy
from tests.chaos.victim import Victim
from tests.integration.server_process import ServerProcess

RESTART_BACKOFF_MAX_S = 0.5
DRAIN_TIMEOUT_S = 8.0
"""Drain time of workers, long enough to show if a dead engine were drained."""
RULES = Rules(WEIGHTS, least_workers=2, pinned=True)
_LASTING = (FIRST_WORKER, FIRST_PREFILL_WORKER, ROUTER, BUS)
_LOOK_EVERY_S = 0.1
WITHOUT_SERVER_S = 5.0
"""Time to wait for answers after the server has ended by itself, in seconds."""


def run_on_mockers(settings: ChaosSettings, root: Path) -> Report:
    """Serve with state in `root`, which the server makes, inject faults, and return the report."""
    report = Report("mocker", settings.seed, settings.seconds)
    with (
        # Not in the root, whose disk is filled up at times.
        tempfile.TemporaryDirectory(prefix="orders-") as folder,
        errors_logged_here() as logged,
        clock_for(settings, root.parent) as clock,
        ServerProcess(root, NAMESPACE, _arguments(settings, orders := Path(folder)), imports=True) as server,
    ):
        server.line("all services ready", within_s=120)
        sockets = Sockets.of_endpoint(server.state().circus_endpoint).directory
        begun = time.monotonic()
        run = _Run(settings, server, report, sockets, machinery_of(server.process.pid, server.paths, clock), orders)
        asyncio.run(run.run())
        report.seconds = time.monotonic() - begun
        if server.process.poll() is not None:
            report.defects.append(f"the server ended by itself: {server.process.returncode}")
        else:
            server.signal(signal.SIGTERM)
        code = server.end()
        if code != 0:
            report.defects.append(f"the server ended with {code}: {server.lines[-5:]}")
        report.defects += files_left(server, sockets) + run.shared.left()
        report.defects += logged + errors_in_logs(server.paths.logs_dir)
    report.defects += report.results.defects
    return report


def _arguments(settings: ChaosSettings, orders: Path) -> list[str]:
    workers = {"VllmWorker": settings.workers}
    graph = "tests.chaos.graph:Router"
    if settings.graph == "disagg":
        workers["PrefillWorker"] = settings.prefill_workers
        graph = "tests.chaos.graph_disagg:Router"
    return [
        *("-m", "dynamo_local.cli.main", "serve", graph, f"--namespace={NAMESPACE}", "--port=0"),
        *(f"--cpu-slots={sum(workers.values())}", f"--restart-backoff-max={RESTART_BACKOFF_MAX_S}"),
        *(argument for name, count in workers.items() for argument in _worker_arguments(name, count, settings, orders)),
    ]


def _worker_arguments(name: str, count: int, settings: ChaosSettings, orders: Path) -> list[str]:
    keys = {
        "ServiceArgs.workers": count,
        "engine": "mocker",
        "drain-timeout-s": DRAIN_TIMEOUT_S,
        "stall-timeout-s": STALL_TIMEOUT_S,
        "mocker-orders": orders,
        "mocker-step-base-ms": settings.step_ms,
        # Few, so that blocks are evicted and requests preempted when few workers are left.
        "mocker-kv-blocks": 512,
        "mocker-block-size": BLOCK_SIZE,
        # Slow, so that faults hit reads, and stopped workers read too late.
        "mocker-transfer-base-ms": 50,
        "mocker-transfer-us-per-block": 3000,
        "mocker-longest-pin-s": 1,
    }
    if name == "PrefillWorker":
        # Without prefix caching a block that is not pinned for its reader is overwritten at once.
        keys["mocker-prefix-caching"] = "false"
    return [f"--{name}.{key}={value}" for key, value in keys.items()]


class _Run:
    """The part of a run while the server runs."""

    def __init__(
        self,
        settings: ChaosSettings,
        server: ServerProcess,
        report: Report,
        sockets: Path,
        machinery: Machinery,
        orders: Path,
    ) -> None:
        self._settings = settings
        self._server = server
        self._sockets = sockets
        self._report = report
        self._machinery = machinery
        self._orders = orders
        self._processes = ServerProcesses(server.paths)
        self._victim = Victim(server.paths.bus_file, settings)
        self._memory = MemoryWatch()
        self.shared = SharedMemoryWatch()

    async def run(self) -> None:
        subjects = Subjects(NAMESPACE, FIRST_OF_MAIN)
        async with TcpProxy(BusAddress.load(self._server.paths.bus_file)) as proxy:
            bus = await Bus.connect(proxy.address, name="chaos")
            settings, name = self._settings, f"{NAMESPACE}_Frontend"
            frontend = ChaosFrontend(
                bus, subjects, name, settings.stall_s, settings.longest_local_prefill, settings.gap_slack_s
            )
            await frontend.start()
            watching = asyncio.create_task(self._watch_memory())
            failed = asyncio.create_task(frontend.tasks.failed())
            try:
                await self._under_fire(frontend, proxy, bus, subjects)
                self._check_alive(failed)
                if self._served():
                    await self._settle(frontend, bus, subjects)
            finally:
                watching.cancel()
                failed.cancel()
                self._report.memory = self._memory.growth()
                await frontend.tasks.close()
                await bus.close()
        self._report.defects += [
            f"{name} grows: {growth}" for name, growth in self._report.memory.items() if not growth.bounded
        ]

    def _served(self) -> bool:
        """Return whether the server still runs. Its early end is reported by `run_on_mockers`."""
        return self._server.process.poll() is None

    async def _under_fire(self, frontend: ChaosFrontend, proxy: TcpProxy, bus: Bus, subjects: Subjects) -> None:
        settings = self._settings
        hit_migrations: Counter[str] = Counter()

        def on_fault(fault: Done) -> None:
            frontend.record_fault(fault)
            self._victim.tell(fault)
            for what, number in frontend.migrations_at(fault.target).items():
                hit_migrations[f"{fault.kind}: {what}"] += number

        role_switch = RoleSwitch(bus, subjects, frontend.fleet) if settings.graph == "disagg" else None
        injector = Injector(
            settings,
            RULES,
            self._processes,
            frontend.fleet,
            *(proxy, self._victim, role_switch, on_fault, self._machinery, self._orders),
        )
        workers = settings.workers + settings.prefill_workers
        await self._until(lambda: len(frontend.fleet.view.routable(ALL_ROLES)) == workers, lambda: "all ready")
        victim = asyncio.create_task(self._victim.run())
        frontend.open_streams(settings.streams, str(settings.seed))
        migrating = TaskGuard()
        migrations = RandomMigrations(bus, subjects, frontend.fleet, migrating, settings)
        migrations.start()
        try:
            await injector.run(lambda: migrations.done >= settings.least_migrations, self._served)
        finally:
            await migrating.close()
            self._report.orders, self._report.not_migrated = dict(migrations.orders), dict(migrations.whys)
            self._report.hit_migrations = dict(hit_migrations)
            self._victim.end()
            deadline_s = settings.stall_s + settings.settle_s if self._served() else WITHOUT_SERVER_S
            unanswered = await frontend.close_streams(deadline_s)
            with nullcontext() if self._served() else suppress(TimeoutError):
                await asyncio.wait_for(victim, deadline_s)
            self._report.faults = injector.counts
            self._report.passed_over = injector.passed_over
            self._report.results = frontend.results.plus(self._victim.results)
            if unanswered:
                self._report.defects.append(f"{unanswered} requests got no answer")

    async def _settle(self, frontend: ChaosFrontend, bus: Bus, subjects: Subjects) -> None:
        """Wait until all is idle, and check that nothing of the requests is left."""
        begun, last = time.monotonic(), list[str]()

        def idle() -> bool:
            busy = self._idle(frontend)
            last[:] = busy or last
            return not busy

        await self._until(idle, lambda: f"all idle: {last}")
        self._report.notes.append(f"all idle after {time.monotonic() - begun:.0f} s; the last was {last or 'nobody'}")
        self._report.defects += frontend.left_over()
        workers = self._settings.workers + self._settings.prefill_workers
        if (files := block_memories(self._sockets)) != workers:
            self._report.defects.append(f"{workers} mockers have left {files} files of blocks")
        if self._settings.graph == "disagg":
            await self._check_queue(PrefillQueue(bus, subjects))
        calls = CallClient(bus, Subjects(NAMESPACE))
        await calls.start()
        running = asyncio.create_task(calls.run())
        charges: dict[str, int] = {}
        deadline = time.monotonic() + self._settings.settle_s
        try:
            while time.monotonic() < deadline:
                charges = await calls.service(Router).charges()
                if not charges:
                    return
                await asyncio.sleep(_LOOK_EVERY_S)
            self._report.defects.append(
                f"still charged in the router's ledger: {charges} (this frontend is {frontend.lease})"
            )
        except DynamoError as error:
            self._report.defects.append(f"the router does not return its charges: {error}")
        finally:
            running.cancel()
            await calls.stop()

    def _idle(self, frontend: ChaosFrontend) -> list[str]:
        """Return the workers that are missing or not idle, in words."""
        workers = frontend.fleet.view.routable(ALL_ROLES)
        busy = [f"{worker.watcher}: {worker.load}" for worker in workers if not _is_idle(worker)]
        missing = self._settings.workers + self._settings.prefill_workers - len(workers)
        return busy + ([f"{missing} not ready"] if missing else [])

    async def _check_queue(self, queue: PrefillQueue) -> None:
        """Check that no job is left in the queue. Jobs of killed frontends expire at their deadlines."""
        length: QueueLength | BusError | None = None
        deadline = time.monotonic() + self._settings.settle_s
        while time.monotonic() < deadline:
            try:
                length = await queue.length()
            except BusError as error:
                length = error
            if length == QueueLength(0, 0):
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        self._report.defects.append(f"the prefill queue is not empty: {length}")

    async def _until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._settings.settle_s
        while not condition():
            if time.monotonic() > deadline:
                self._report.defects.append(f"not within {self._settings.settle_s:g} s: {what()}")
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _check_alive(self, failed: asyncio.Task[None]) -> None:
        with suppress(asyncio.CancelledError):
            if failed.done() and (error := failed.exception()) is not None:
                self._report.defects.append(f"a task of the frontend died: {error!r}")

    async def _watch_memory(self) -> None:
        serve = self._server.process.pid
        while True:
            found = await asyncio.to_thread(self._processes.by_watcher)
            pids = {name: found[name].pid for name in _LASTING if name in found}
            pids |= {"the harness's frontend": os.getpid(), "dynamo serve": serve}
            if (circusd := self._machinery.circusd()) is not None:
                pids["circusd"] = circusd.pid
            self._memory.sample(pids)
            self.shared.sample(process.pid for process in descendants(serve))
            await asyncio.sleep(EVERY_S)


def _is_idle(worker: Presence) -> bool:
    load = worker.load
    # A worker that has had no request reports no load.
    return load is None or not any((load.running, load.waiting, load.kv_usage, load.kv_pinned))
