"""How long until a worker takes requests, against vLLM's own server, and how fast each decodes afterwards.

Each round starts the whole of ours, then kills its worker and times the next one (that is what a system that scales
waits for); does the same with every process importing vLLM by itself, or with another revision beside; then starts
vLLM's own server. Nothing is bound to cores until it is ready. When a worker was heard of first, and when it was ready,
is what `dynamo events` tells.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import cpu_s
from benchmarks.harness.calm import Patience
from benchmarks.harness.load import Shape, closed_loop
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress, table
from benchmarks.harness.servers import (
    BESIDE,
    OURS,
    READY_WITHIN_S,
    ROOT,
    Server,
    ServerError,
    add_beside,
    add_override,
    in_turn,
    parse_overrides,
    running,
    spread_over_cores,
    start_ours,
    start_vllm,
)
from benchmarks.harness.spread import Interval, bootstrap, median

SUMMARY = "seconds until a worker is routable, against vLLM's own server, and decode speed afterwards"
ENGINE_CORE = 0
_ALONE = "ours, --no-forkserver"
_STREAMS = (1, 8)
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 2.5
"""A command takes CPU time, which a worker that starts meanwhile would lack."""
_TURN_S = 3.0
_COMPARED = {"whole_s": "everything", "worker_s": "one more worker", "worker_cpu_s": "its CPU time"}
_SHAPE = Shape(min_tokens=48, max_tokens=96)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="starts of each side (3)")
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    add_beside(parser)
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    model, overrides = str(model_folder(arguments.model)), parse_overrides(arguments.override)
    sides = (OURS, BESIDE if arguments.beside else _ALONE)
    ours: dict[str, list[Figures]] = {side: [] for side in sides}
    theirs: list[Figures] = []
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    for number in range(rounds):
        await patience.wait()
        for side in in_turn(sides, number):
            options = ("--no-forkserver",) if side == _ALONE else ()
            checkout = arguments.beside if side == BESIDE else ROOT
            ours[side].append(await _start_ours(model, number, overrides, options, checkout))
            progress(f"round {number + 1}, {side}: {_told(ours[side][-1])}")
        theirs.append(await _start_vllm(model, number))
        progress(f"round {number + 1}, vLLM: {_told(theirs[-1])}")
    return _report(ours, theirs)


async def _start_ours(
    model: str, seed: int, overrides: dict[str, str], options: Sequence[str], checkout: Path
) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), model, "agg", overrides, options, checkout)
        async with running(server):
            all_s = await server.ready()
            first, phases = await _started(server)
            started: Figures = {"whole_s": all_s, "with_the_rest_s": phases["ready"]}
            os.kill(first, signal.SIGKILL)
            second, phases = await _started(server, {first})
            started |= {"worker_s": phases["ready"], "worker_cpu_s": cpu_s(second), "phases_s": phases}
            await server.ready()
            return started | {"step_s": await _steps(server, seed)}


async def _start_vllm(model: str, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_vllm(Path(scratch), model, ENGINE_CORE)
        async with running(server):
            started = {"whole_s": await server.ready(), "cpu_s": cpu_s(server.popen.pid)}
            return started | {"step_s": await _steps(server, seed)}


async def _started(server: Server, known: Collection[int] = ()) -> tuple[int, dict[str, float]]:
    """The pid of the one worker that is ready, none of the known ones, and the seconds from the start of its process to
    what `dynamo events` tells of it. Of a forked process, the start is that of the one that circus started for it."""
    async with asyncio.timeout(READY_WITHIN_S):
        rows: list[dict[str, Any]] = []
        while not rows:
            await asyncio.sleep(_LOOK_EVERY_S)
            rows = [row for row in await server.dynamo("ps") if _is_new(row, known)]
    pid: int = rows[0]["pid"]
    server.refresh()
    begun_s = min(process.started_s for process in server.of_role("worker host"))
    begun = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + begun_s
    events = [event for event in await server.events("start") if event.get("pid") == pid]
    return pid, {event["what"].split()[0]: event["time"] - begun for event in reversed(events)}


def _is_new(row: Mapping[str, Any], known: Collection[int]) -> bool:
    return row["role"] == "aggregated" and row["state"] == "ready" and row["pid"] not in known


async def _steps(server: Server, seed: int) -> dict[str, float]:
    """Median time for a token of a stream, with both sides' engines in the same place."""
    server.refresh()
    spread_over_cores([server], ENGINE_CORE)
    await closed_loop(server, streams=4, seconds=1.5, seed=-1, shape=_SHAPE)
    steps = {}
    for streams in _STREAMS:
        load = await closed_loop(server, streams=streams, seconds=_TURN_S, seed=seed, shape=_SHAPE)
        if load.failures or not load.tokens_took_s:
            raise ServerError(f"{server.name} did not decode: {load.failures[:1]}\n{server.last_lines()}")
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
    pairs = zip(ours[OURS], theirs, strict=True)
    ratio = bootstrap([mine["worker_s"] / other["whole_s"] for mine, other in pairs])
    table("Seconds until ready", ("start of", "seconds [95 %]"), [[name, i.shown(1)] for name, i in rows.items()])
    print(f"one more worker of ours / vLLM's own server: {ratio.shown(2)}")
    if BESIDE in ours:
        compare("", _COMPARED, {"seconds": ours[OURS]}, {"seconds": ours[BESIDE]})
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
