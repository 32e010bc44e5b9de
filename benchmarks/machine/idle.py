"""What a server costs that nobody asks anything: CPU time and wake-ups of each of its processes and threads.

CPU time is the scheduler's, in ns (/proc/PID/task/TID/schedstat): ticks are too coarse for threads that wake for
microseconds. Switches are voluntary and involuntary ones; a thread that wakes up and waits again makes one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import OTHER, Process
from benchmarks.harness.calm import Patience
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import add_override, parse_overrides, running, start_ours
from benchmarks.machine.thread_times import ThreadTimes, read_threads

SUMMARY = "CPU time and wake-ups of an idle server, by process and thread"
_SETTLE_S = 5.0
"""After /health has answered: what starting has left to do is no idling."""

_PATIENCE_S = 30.0
_THREADS_SHOWN = 20


@dataclass(frozen=True)
class Rate:
    """Of one thread, or of the threads of one process together."""

    process: str
    thread: str
    cpu_ms_per_s: float
    switches_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", default="agg_router", help="example graph (agg_router)")
    parser.add_argument("--seconds", type=float, help="how long to measure (30)")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    seconds = arguments.seconds or (5.0 if arguments.quick else 30.0)
    model = str(model_folder(RANDOM))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), model, arguments.graph, parse_overrides(arguments.override))
        async with running(server):
            progress(f"{arguments.graph} ready after {await server.ready():.1f} s")
            await asyncio.sleep(_SETTLE_S)
            await Patience(0 if arguments.quick else _PATIENCE_S).wait(server.processes)
            server.refresh()
            rates = await _measure(server.processes, seconds)
    return _report(arguments.graph, seconds, rates)


async def _measure(processes: Iterable[Process], seconds: float) -> list[Rate]:
    processes = tuple(processes)
    before = read_threads(process.pid for process in processes)
    await asyncio.sleep(seconds)
    after = read_threads(process.pid for process in processes)
    names = _names(processes)
    return [_rate(names[key.pid], before[key], now) for key, now in after.items() if key in before]


def _rate(process: str, before: ThreadTimes, now: ThreadTimes) -> Rate:
    took_s = now.at - before.at
    return Rate(
        process, now.name, (now.cpu_ns - before.cpu_ns) / took_s / 1e6, (now.switches - before.switches) / took_s
    )


def _names(processes: Iterable[Process]) -> dict[int, str]:
    """What each process is for, numbered where there are several."""
    names: dict[int, str] = {}
    for process in processes:
        role = process.role if process.role != OTHER else "helpers of dynamo serve"
        same = sum(name == role or name.startswith(f"{role} #") for name in names.values())
        names[process.pid] = role if same == 0 else f"{role} #{same + 1}"
    return names


def _report(graph: str, seconds: float, threads: list[Rate]) -> Figures:
    processes = _by_process(threads)
    cpu = sum(rate.cpu_ms_per_s for rate in processes)
    switches = sum(rate.switches_per_s for rate in processes)
    title = f"Idle {graph}: {cpu / 10:.2f} % of a core, {switches:.0f} switches/s ({seconds:g} s)"
    headers = ("process", "CPU ms/s", "switches/s")
    table(title, headers, [[rate.process, *_shown(rate)] for rate in processes])
    busiest = sorted(threads, key=lambda rate: -rate.cpu_ms_per_s)[:_THREADS_SHOWN]
    table(
        "Its busiest threads",
        ("process", "thread", *headers[1:]),
        [[rate.process, rate.thread, *_shown(rate)] for rate in busiest],
    )
    return {
        "graph": graph,
        "seconds": seconds,
        "cpu_ms_per_s": cpu,
        "switches_per_s": switches,
        "processes": [vars(rate) for rate in processes],
        "threads": [vars(rate) for rate in threads],
    }


def _by_process(threads: Iterable[Rate]) -> list[Rate]:
    sums: dict[str, Rate] = {}
    for rate in threads:
        known = sums.get(rate.process, Rate(rate.process, "all", 0.0, 0.0))
        cpu, switches = known.cpu_ms_per_s + rate.cpu_ms_per_s, known.switches_per_s + rate.switches_per_s
        sums[rate.process] = Rate(rate.process, "all", cpu, switches)
    return sorted(sums.values(), key=lambda rate: -rate.cpu_ms_per_s)


def _shown(rate: Rate) -> tuple[str, str]:
    return f"{rate.cpu_ms_per_s:.2f}", f"{rate.switches_per_s:.1f}"
