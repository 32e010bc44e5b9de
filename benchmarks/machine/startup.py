"""How long until a worker takes requests, against vLLM's own server, and how fast each decodes afterwards.

Each round starts the whole of ours, then kills its worker and times the next one (that is what a system that scales
waits for); does the same with every process importing vLLM by itself; then starts vLLM's own server. Nothing is bound
to cores until it is ready.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import descendants, read_stat
from benchmarks.harness.calm import Patience
from benchmarks.harness.load import Shape, closed_loop
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import (
    Server,
    ServerError,
    add_override,
    parse_overrides,
    running,
    spread_over_cores,
    start_ours,
    start_vllm,
)
from benchmarks.harness.spread import Interval, bootstrap, median

SUMMARY = "seconds until a worker is routable, against vLLM's own server, and decode speed afterwards"
ENGINE_CORE = 0
_OURS = "ours"
_SIDES: Mapping[str, Sequence[str]] = {_OURS: (), "ours, --no-forkserver": ("--no-forkserver",)}
"""Options of `dynamo serve` by what they are called."""

_STREAMS = (1, 8)
_PATIENCE_S = 60.0
_TURN_S = 3.0
_SHAPE = Shape(min_tokens=48, max_tokens=96)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="starts of each side (3)")
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    model = str(model_folder(arguments.model))
    ours: dict[str, list[Figures]] = {side: [] for side in _SIDES}
    theirs: list[Figures] = []
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    for number in range(rounds):
        await patience.wait()
        for side, options in _SIDES.items():
            ours[side].append(await _start_ours(model, number, parse_overrides(arguments.override), options))
            progress(f"round {number + 1}, {side}: {_told(ours[side][-1])}")
        theirs.append(await _start_vllm(model, number))
        progress(f"round {number + 1}, vLLM: {_told(theirs[-1])}")
    return _report(ours, theirs)


async def _start_ours(model: str, seed: int, overrides: dict[str, str], options: Sequence[str] = ()) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), model, "agg", overrides, options)
        async with running(server), PresenceLog(server) as log:
            all_s = await server.ready()
            first = await log.ready_worker()
            started: Figures = {"whole_s": all_s, "with_the_rest_s": _timings(server, log, first.lease)["ready"]}
            os.kill(first.pid, signal.SIGKILL)
            second = await log.ready_worker(frozenset({first.lease}))
            phases = _timings(server, log, second.lease)
            started |= {"worker_s": phases["ready"], "worker_cpu_s": _cpu_s(second.pid), "phases_s": phases}
            await server.ready()
            return started | {"step_s": await _steps(server, seed)}


async def _start_vllm(model: str, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_vllm(Path(scratch), model, ENGINE_CORE)
        async with running(server):
            started = {"whole_s": await server.ready(), "cpu_s": _cpu_s(server.popen.pid)}
            return started | {"step_s": await _steps(server, seed)}


def _cpu_s(root: int) -> float:
    """CPU seconds that a process and its descendants have used. Other work on the machine hardly changes them."""
    return sum(stat.cpu_s for process in descendants(root) if (stat := read_stat(process.pid)) is not None)


def _timings(server: Server, log: PresenceLog, lease: str) -> dict[str, float]:
    """Seconds from the start of the one worker's process to each stage that it told of. If the process was forked, from
    the start of the one that circus started for it."""
    server.refresh()
    started_s = min((process.started_s for process in server.of_role("worker host")), default=None)
    if started_s is None:
        raise ServerError("a worker was gone before it could be looked at")
    return {stage: at - started_s for stage, at in log.phases(lease).items()}


async def _steps(server: Server, seed: int) -> dict[str, float]:
    """Median time for a token of a stream, with both sides' engines in the same place."""
    server.refresh()
    spread_over_cores([server], ENGINE_CORE)
    await closed_loop(server, streams=4, seconds=1.5, seed=-1, shape=_SHAPE)
    steps = {}
    for streams in _STREAMS:
        load = await closed_loop(server, streams=streams, seconds=_TURN_S, seed=seed, shape=_SHAPE)
        if load.failures or not load.tokens_took_s:
            raise ServerError(f"{server.name} did not decode: {load.failures[:1]}")
        steps[str(streams)] = median(load.tokens_took_s)
    return steps


def _told(figures: Figures) -> str:
    steps = ", ".join(f"{1e3 * step:.1f} ms at {streams} streams" for streams, step in figures["step_s"].items())
    worker = f"another worker {figures['worker_s']:.1f} s, " if "worker_s" in figures else ""
    return f"all {figures['whole_s']:.1f} s, {worker}a token {steps}"


def _report(ours: Mapping[str, Sequence[Figures]], theirs: Sequence[Figures]) -> Figures:
    rows = {"vLLM's own server": _estimate(theirs, "whole_s")}
    cpu = {"vLLM's own server": _estimate(theirs, "cpu_s")}
    for side, rounds in ours.items():
        rows[f"{side}: everything (`dynamo serve` to /health)"] = _estimate(rounds, "whole_s")
        rows[f"{side}: its worker, started beside the rest"] = _estimate(rounds, "with_the_rest_s")
        rows[f"{side}: one more worker"] = _estimate(rounds, "worker_s")
        cpu[f"{side}: one more worker"] = _estimate(rounds, "worker_cpu_s")
    pairs = zip(ours[_OURS], theirs, strict=True)
    ratio = bootstrap([mine["worker_s"] / other["whole_s"] for mine, other in pairs])
    table("Seconds until ready", ("start of", "seconds [95 %]"), [[name, i.shown(1)] for name, i in rows.items()])
    print(f"one more worker of ours / vLLM's own server: {ratio.shown(2)}")
    table("CPU seconds until ready", ("start of", "CPU s [95 %]"), [[name, i.shown(1)] for name, i in cpu.items()])
    for side, rounds in ours.items():
        stages = [[name, i.shown(1)] for name, i in _stages(rounds).items()]
        table(f"Stages of one more worker, {side}", ("until", "seconds [95 %]"), stages)
    steps = {side: {n: _step_ratio(rounds, theirs, n) for n in map(str, _STREAMS)} for side, rounds in ours.items()}
    table(
        "Decode speed afterwards",
        ("side", "streams", "ms a token vLLM", "ours", "ours / vLLM [95 %]"),
        [
            [side, n, f"{1e3 * _step(theirs, n):.2f}", f"{1e3 * _step(ours[side], n):.2f}", ratio.shown(2)]
            for side, ratios in steps.items()
            for n, ratio in ratios.items()
        ],
    )
    return {
        "ours": {side: list(rounds) for side, rounds in ours.items()},
        "vllm": list(theirs),
        "worker_to_vllm": vars(ratio),
        "step_ratio": {side: {n: vars(i) for n, i in ratios.items()} for side, ratios in steps.items()},
    }


def _estimate(rounds: Sequence[Figures], key: str) -> Interval:
    return bootstrap([figures[key] for figures in rounds])


def _stages(ours: Sequence[Figures]) -> dict[str, Interval]:
    names: dict[str, Any] = dict.fromkeys(stage for figures in ours for stage in figures["phases_s"])
    return {name: bootstrap([f["phases_s"][name] for f in ours if name in f["phases_s"]]) for name in names}


def _step(rounds: Sequence[Figures], streams: str) -> float:
    return median([figures["step_s"][streams] for figures in rounds])


def _step_ratio(ours: Sequence[Figures], theirs: Sequence[Figures], streams: str) -> Interval:
    pairs = zip(ours, theirs, strict=True)
    return bootstrap([mine["step_s"][streams] / other["step_s"][streams] for mine, other in pairs])
