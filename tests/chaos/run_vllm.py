"""A run on vLLM workers, through the OpenAI API."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from state.paths import Sockets
from tests.chaos.faults import STALL_TIMEOUT_S, WEIGHTS_ON_VLLM
from tests.chaos.http_clients import HttpClients
from tests.chaos.injector import ALL_ROLES, FIRST_WORKER, ROUTER, Injector, Rules
from tests.chaos.judges import PROMPTS, GreedyTokens, SameTokens
from tests.chaos.leftovers import SharedMemoryWatch, files_left
from tests.chaos.machinery import Machinery, clock_for, machinery_of
from tests.chaos.memory import EVERY_S, MemoryWatch
from tests.chaos.migrations import RandomMigrations
from tests.chaos.processes import ServerProcesses, descendants
from tests.chaos.report import Report
from tests.chaos.run import WITHOUT_SERVER_S
from tests.chaos.settings import NAMESPACE, ChaosSettings
from tests.e2e.llm_server import LlmServer, none_of
from tests.integration.server_process import eventually

ON_VLLM: dict[str, Any] = {
    "workers": 2,
    "streams": 6,
    "faults_per_s": 0.2,
    "migrations_per_s": 2.0,
    "stall_s": 180.0,
    "settle_s": 240.0,
    "gap_slack_s": 5.0,
}
ON_DISAGG_VLLM = {**ON_VLLM, "graph": "disagg", "prefill_workers": 2}
"""Default settings with vLLM, where a worker takes half a minute to start."""

RULES = Rules(WEIGHTS_ON_VLLM, least_workers=1, pinned=False)
_LOOK_EVERY_S = 0.2


def run_on_vllm(settings: ChaosSettings, root: Path) -> Report:
    """Serve with state in `root`, which the server makes, inject faults, and return the report."""
    report = Report("vllm", settings.seed, settings.seconds)
    shared = SharedMemoryWatch()
    with clock_for(settings, root.parent) as clock, LlmServer(root, NAMESPACE, _options(settings)) as server:
        server.await_ready()
        machinery = machinery_of(server.process.pid, server.paths, clock)
        sockets = Sockets.of_endpoint(server.state().circus_endpoint).directory
        begun = time.monotonic()
        asyncio.run(_run(settings, server, report, shared, machinery))
        report.seconds = time.monotonic() - begun
        tree = server.tree()
        if _served(server):
            server.signal(signal.SIGTERM)
        else:
            report.defects.append(f"the server ended by itself: {server.process.returncode}")
        code = server.end()
        if code != 0:
            report.defects.append(f"the server ended with {code}: {server.lines[-5:]}")
        try:
            eventually(lambda: none_of(tree), "processes")
        except AssertionError:
            report.defects.append(f"processes left: {tree}")
        report.defects += files_left(server, sockets) + shared.left()
    report.defects += report.results.defects
    return report


def _options(settings: ChaosSettings) -> list[str]:
    graph = "disagg" if settings.graph == "disagg" else "agg_router"
    options = [
        f"examples.llm.graphs.{graph}:Frontend",
        f"--file=examples/llm/configs/{graph}.yaml",
        f"--cpu-slots={settings.workers + settings.prefill_workers}",
        f"--VllmWorker.ServiceArgs.workers={settings.workers}",
        f"--VllmWorker.stall-timeout-s={STALL_TIMEOUT_S:g}",
        f"--VllmWorker.kv-transfer={'true' if settings.migrations_per_s > 0 else 'false'}",
        "--restart-backoff-max=0.5",
    ]
    if settings.graph == "disagg":
        options += [
            f"--PrefillWorker.ServiceArgs.workers={settings.prefill_workers}",
            f"--PrefillWorker.stall-timeout-s={STALL_TIMEOUT_S:g}",
            f"--Frontend.max-local-prefill-length={settings.max_local_prefill_length}",
        ]
    return options + _model_options(settings)


def _model_options(settings: ChaosSettings) -> list[str]:
    if settings.real_model:
        return [f"--model={GreedyTokens.model}"]
    workers = ("VllmWorker", "PrefillWorker") if settings.graph == "disagg" else ("VllmWorker",)
    return [f"--model={SameTokens.model}", *(f"--{worker}.dtype=float32" for worker in workers)]


def _served(server: LlmServer) -> bool:
    return server.process.poll() is None


async def _run(
    settings: ChaosSettings, server: LlmServer, report: Report, shared: SharedMemoryWatch, machinery: Machinery
) -> None:
    tasks = TaskGuard()
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="chaos")
    fleet = FleetWatch(bus, Subjects(NAMESPACE, FIRST_OF_MAIN))
    await fleet.start()
    tasks.spawn("fleet", fleet.run())
    processes, memory = ServerProcesses(server.paths), MemoryWatch()
    tasks.spawn("memory", _watch_memory(server, processes, memory, shared))
    clients = HttpClients(
        server.url, settings.seed, settings.stall_s, settings.gap_slack_s, real_model=settings.real_model
    )
    try:
        known = await clients.learn_answers()
        report.notes.append(f"{known} of {PROMPTS} questions have one answer and are asked")
        injector = Injector(settings, RULES, processes, fleet, on_fault=clients.record_fault, machinery=machinery)
        clients.open_streams(settings.streams)
        migrating = TaskGuard()
        migrations = RandomMigrations(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), fleet, migrating, settings)
        migrations.start()
        await injector.run(lambda: migrations.done >= settings.least_migrations, lambda: _served(server))
        await migrating.close()
        report.faults, report.passed_over = injector.counts, injector.passed_over
        report.orders, report.not_migrated = dict(migrations.orders), dict(migrations.whys)
        served = _served(server)
        unanswered = await clients.close_streams(settings.stall_s + settings.settle_s if served else WITHOUT_SERVER_S)
        report.results = await clients.counted() if served else clients.results
        if unanswered:
            report.defects.append(f"{unanswered} requests got no answer")
        if served:
            await _settle(settings, fleet, report)
    finally:
        await clients.close()
        report.memory = memory.growth()
        await tasks.close()
        await bus.close()


async def _settle(settings: ChaosSettings, fleet: FleetWatch, report: Report) -> None:
    """Wait until all workers are ready and idle."""
    deadline = time.monotonic() + settings.settle_s
    while time.monotonic() < deadline:
        workers = fleet.view.routable(ALL_ROLES)
        idle = all(_is_idle(worker.load) for worker in workers)
        if len(workers) == settings.workers + settings.prefill_workers and idle:
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    report.defects.append(f"not idle within {settings.settle_s:g} s: {fleet.view.members()}")


def _is_idle(load: Load | None) -> bool:
    return load is None or not (load.running or load.waiting or load.kv_usage or load.kv_pinned)


async def _watch_memory(
    server: LlmServer, processes: ServerProcesses, memory: MemoryWatch, shared: SharedMemoryWatch
) -> None:
    while True:
        found = await asyncio.to_thread(processes.by_watcher)
        names = (f"{NAMESPACE}_Frontend", ROUTER, FIRST_WORKER)
        memory.sample({name: found[name].pid for name in names if name in found} | {"dynamo serve": server.process.pid})
        shared.sample(process.pid for process in descendants(server.process.pid))
        await asyncio.sleep(EVERY_S)
