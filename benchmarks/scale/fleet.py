"""What the presences of a fleet cost who hears them, and what its planner's look at them costs.

The fleet announces itself from one process, over real NATS. Listeners are in turns those of a frontend or router, which
hear everybody, and those of a worker, which hears frontends alone. Each listener has a connection of its own; what NATS
uses for who listens is counted as what it uses beyond a turn with no listener at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.accounting import Process, usage
from benchmarks.harness.nats import nats_server
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import NAMESPACE
from benchmarks.harness.spread import median, quantile
from benchmarks.scale.announcers import FRONTENDS, fleet
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.steps import step
from dynamo_local.core.planning.window import Claim, aggregate, observe
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

SUMMARY = "presences and the planner's decisions of fleets of up to 1,000 workers"
_SIZES = (100, 1_000)
_SECONDS = 10.0
_LISTENERS = 4
_HEARD_WITHIN_S = 60.0
_POLL_S = 0.1
_FEW = 100
_LOOKS = 25
_NATS = "nats"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=_SIZES, help="sizes of fleets (100 1000)")
    parser.add_argument("--seconds", type=float, help=f"length of a turn ({_SECONDS:g})")


@dataclass(frozen=True)
class Turn:
    """Means of one second: messages that each listener got, CPU seconds of each listener, and of NATS in all."""

    messages: float
    listener_cpu: float
    nats_cpu: float


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    seconds = arguments.seconds or (2.0 if arguments.quick else _SECONDS)
    found: Figures = {}
    for workers in arguments.workers:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            async with nats_server(Path(scratch, "nats")) as (address, processes), _announced(address, workers):
                turns = {
                    "nobody": await _turn(address, processes, 0, workers, seconds),
                    "everybody": await _turn(address, processes, _LISTENERS, workers, seconds),
                    "frontends": await _turn(address, processes, _LISTENERS, workers, seconds, frontends_alone=True),
                }
        looks = _looks(workers, 5 if arguments.quick else _LOOKS)
        found[str(workers)] = {
            "turns": {name: vars(turn) for name, turn in turns.items()},
            "look_s": {"p50": median(looks), "p99": quantile(looks, 0.99)},
        }
        progress(f"{workers} workers: done")
    _report(found)
    return found


@contextlib.asynccontextmanager
async def _announced(address: BusAddress, workers: int) -> AsyncIterator[None]:
    """The fleet announces itself for the time of the block."""
    popen = _start(workers)
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        popen.stdin.write(msgspec.json.encode(address) + b"\n")
        popen.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(popen.stdout.readline), _HEARD_WITHIN_S)
        if line.strip() != b"ready":
            raise BusError("the fleet does not announce itself")
        yield
    finally:
        popen.stdin.close()
        await asyncio.to_thread(popen.wait)


def _start(workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.scale.announcers", str(workers)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _turn(
    address: BusAddress,
    processes: tuple[Process, ...],
    listeners: int,
    workers: int,
    seconds: float,
    *,
    frontends_alone: bool = False,
) -> Turn:
    """Listen for so long, once all that are to be heard have been."""
    tasks, buses = TaskGuard(), []
    heard = 0

    def count(_: object) -> None:
        nonlocal heard
        heard += 1

    watches = []
    try:
        for number in range(listeners):
            buses.append(await Bus.connect(address, name=f"listener {number}"))
            watch = FleetWatch(buses[-1], Subjects(NAMESPACE), frontends_alone=frontends_alone)
            watch.subscribe(count)
            await watch.start()
            tasks.spawn("fleet", watch.run())
            watches.append(watch)
        expected = FRONTENDS if frontends_alone else workers + FRONTENDS
        async with asyncio.timeout(_HEARD_WITHIN_S):
            while any(len(watch.view.members()) < expected for watch in watches):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        heard, before, cpu, begin = 0, usage(processes), time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        lasted, cpu = time.monotonic() - begin, time.process_time() - cpu
        used = usage(processes).since(before).roles.get(_NATS, 0.0)
        each = max(listeners, 1) * lasted
        return Turn(heard / each, cpu / each if listeners else 0.0, used / lasted)
    finally:
        await tasks.close()
        for bus in buses:
            await bus.close()


def _looks(workers: int, number: int) -> list[float]:
    """CPU seconds of the planner's observation and decision, each."""
    presences = fleet(workers)
    claims = [Claim(each.watcher, each.role, 1) for each in presences if each.engine is not None]
    templates = {"VllmWorker": "aggregated"}
    options = PlannerOptions()
    taken = []
    for look in range(number):
        begun = time.thread_time()
        window = aggregate([observe(float(look), claims, presences, presences, None, templates)])
        step(window, (), options, workers)
        taken.append(time.thread_time() - begun)
    return taken


def _report(found: Figures) -> None:
    rows = []
    for workers, figures in found.items():
        idle = figures["turns"]["nobody"]["nats_cpu"]
        for name in ("everybody", "frontends"):
            turn = figures["turns"][name]
            sent = (turn["nats_cpu"] - idle) / (_LISTENERS * max(turn["messages"], 1))
            rows.append(
                [
                    workers,
                    name,
                    f"{turn['messages']:,.0f}",
                    f"{100 * turn['listener_cpu']:.2f} %",
                    f"{1e6 * turn['listener_cpu'] / max(turn['messages'], 1):.0f}",
                    # So few messages cost nothing that could be told from what else NATS does.
                    f"{1e6 * sent:.1f}" if turn["messages"] > _FEW else "-",
                ]
            )
    table(
        "Presences, for each who listens",
        ("workers", "hears", "messages/s", "of a core", "µs each", "NATS, µs each"),
        rows,
    )
    table(
        "The planner's look at all workers",
        ("workers", "median, ms", "p99, ms"),
        [
            [workers, *(milliseconds(figures["look_s"][key]) for key in ("p50", "p99"))]
            for workers, figures in found.items()
        ],
    )
