"""A raylet that joins a Ray cluster whose graph lacks workers: when does it have one that requests can go to?

Two nodes have two mockers each. In each round one raylet is killed and, once Ray says so, another one joins. What
happens in between is read from the processes: when each started, and what it had used of a core at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import descendants, read_stat
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.raylets import Raylets, raylet_pid, raylets
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, READY_WITHIN_S, Server, ServerError, add_project, running, start_ours
from benchmarks.harness.spread import median
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from state.paths import StatePaths

SUMMARY = "how soon a raylet that joins a Ray cluster has a worker, and what takes that long"
_ROUNDS = 5
_CORES = 2
_WORKERS = 4
_POLL_S = 0.01
_SETTLE_S = 3.0
_PARTS = (
    ("raylet/raylet", "raylet"),
    ("NodeAgent", "agent"),
    ("default_worker.py", "agent"),
    ("dynamo_local.supervisor.node", "node server"),
    ("circusd", "circusd"),
    ("--service VllmWorker", "worker"),
)
"""What the command line of a process of the node contains, and what it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="raylets that join")
    parser.add_argument("--prestart", action="store_true", help="raylets start Python processes ahead, as by default")
    add_project(parser)


@dataclass(frozen=True)
class Joining:
    """Seconds since the raylet's launch at which each step was taken, and CPU seconds of each process by the last."""

    at_s: Mapping[str, float]
    cpu_s: Mapping[str, float]


class Fleet:
    """The workers that are heard."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch

    def ready(self) -> dict[str, Presence]:
        """The workers that are ready, by lease."""
        members = self._watch.view.members()
        return {one.lease: one for one in members if one.role in ENGINE_ROLES and one.state == "ready"}

    async def of(self, number: int) -> None:
        """Wait until so many are ready."""
        await _until(lambda: len(self.ready()) == number, f"there are not {number} workers")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = 1 if arguments.quick else arguments.rounds
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as scratch,
        raylets(0, Path(scratch), prestart=arguments.prestart, project=arguments.project) as cluster,
    ):
        for cores in (0, _CORES, _CORES):
            cluster.add(cores)
        server = start_ours(
            Path(scratch),
            str(model_folder(RANDOM)),
            "agg_router",
            {"VllmWorker.engine": "mocker", "VllmWorker.ServiceArgs.workers": _WORKERS},
            ["--environment", "ray", "--address", cluster.address],
            arguments.project,
        )
        async with running(server):
            await server.ready()
            joinings = await _measured(cluster, server, rounds)
    return _report(joinings)


async def _measured(cluster: Raylets, server: Server, rounds: int) -> list[Joining]:
    assert server.state_root is not None
    paths, tasks = StatePaths(server.state_root, NAMESPACE), TaskGuard()
    bus = await Bus.connect(BusAddress.load(paths.bus_file), name="benchmark")
    try:
        watch = FleetWatch(bus, Subjects(NAMESPACE, FIRST_OF_MAIN))
        await watch.start()
        tasks.spawn("fleet", watch.run())
        fleet = Fleet(watch)
        joinings = []
        for number in range(rounds):
            await fleet.of(_WORKERS)
            joinings.append(await _joining(cluster, fleet))
            progress(f"round {number + 1}: a worker after {joinings[-1].at_s['worker is ready']:.2f} s")
        return joinings
    finally:
        await tasks.close()
        await bus.close()


async def _joining(cluster: Raylets, fleet: Fleet) -> Joining:
    cluster.kill(cluster.nodes[-1])
    await fleet.of(_WORKERS - _CORES)
    # Until Ray has said that the node is dead, and the graph has tried to have its workers elsewhere.
    await asyncio.sleep(_SETTLE_S)
    before = fleet.ready()
    known = cluster.alive()
    began, booted_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    table_of_nodes = asyncio.create_task(asyncio.to_thread(_joined_at, cluster, known))
    # The thread has to have begun.
    await asyncio.sleep(0)
    # Not in a thread: Ray sets signal handlers.
    joined = cluster.add(_CORES, wait=False)
    at = {"raylet is launched": time.monotonic() - began}
    await _until(lambda: fleet.ready().keys() > before.keys(), "the raylet has no worker")
    at["worker is ready"] = time.monotonic() - began
    (first, *_) = (each for lease, each in fleet.ready().items() if lease not in before)
    cpu: dict[str, float] = {}
    for process in descendants(raylet_pid(joined)):
        part, stat = _part(process.pid, first.pid), read_stat(process.pid)
        if part is not None and stat is not None:
            at.setdefault(f"{part} starts", stat.started_s - booted_s)
            cpu[part] = cpu.get(part, 0.0) + stat.cpu_s
    at["Ray has the node"] = await table_of_nodes - began
    return Joining(at, cpu)


def _joined_at(cluster: Raylets, known: Set[str]) -> float:
    """When Ray's table has another node."""
    until = time.monotonic() + READY_WITHIN_S
    while cluster.alive() <= known and time.monotonic() < until:
        time.sleep(_POLL_S)
    return time.monotonic()


def _part(pid: int, worker: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return None
    part = next((part for words, part in _PARTS if words in command), None)
    return None if part == "worker" and pid != worker else part


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            while not condition():  # noqa: ASYNC110  # presences, which nobody here waits for
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ServerError(what) from None


def _report(joinings: list[Joining]) -> Figures:
    steps = sorted(joinings[0].at_s, key=lambda step: median([one.at_s.get(step, 0.0) for one in joinings]))
    rows = []
    for step in steps:
        at = [one.at_s[step] for one in joinings if step in one.at_s]
        part = step.removesuffix(" starts")
        cpu = [one.cpu_s[part] for one in joinings if part in one.cpu_s]
        rows.append(
            (step, f"{median(at):.2f}", f"{min(at):.2f} to {max(at):.2f}", f"{median(cpu):.2f}" if cpu else "-")
        )
    table(f"A raylet that joins, {len(joinings)} times", ("step", "at s", "range", "CPU s until ready"), rows)
    return {"joinings": [{"at_s": dict(one.at_s), "cpu_s": dict(one.cpu_s)} for one in joinings]}
