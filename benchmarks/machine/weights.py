"""How long one more worker takes, and a killed one's replacement, with and without `prepared-weights`, by model.

Each turn starts a server of its own with one worker, adds and drains another one a few times, as the planner does, then
kills the first. No request runs. On a busy machine, CPU seconds tell more than seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.models import LARGE, RANDOM, model_folder
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, Server, ServerError, running, start_ours
from benchmarks.harness.spread import bootstrap
from benchmarks.machine.workers import one_more
from dynamo_local.core.names import Watcher
from state.paths import StatePaths

SUMMARY = "seconds until one more worker is routable, and a killed one is replaced, with and without prepared-weights"

_SIDES = {"without": False, "with": True}
_MODELS = (RANDOM, LARGE)
_ADDED = 4
"""Workers that are added and drained in each turn."""

_PREPARED_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1
_ROWS = {
    "worker_s": "one more worker, s",
    "worker_cpu_s": "CPU of its own, s",
    "memory_mib": "memory of its own, MiB",
    "replaced_s": "a killed one is replaced, s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="servers of each side and model (3)")
    parser.add_argument("--model", choices=_MODELS, help="one of the models (both)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    models = _MODELS if arguments.model is None else (arguments.model,)
    found: dict[str, dict[str, list[Figures]]] = {model: {side: [] for side in _SIDES} for model in models}
    for number in range(arguments.rounds or (1 if arguments.quick else 3)):
        sides = list(_SIDES)
        for model in models:
            for side in sides if number % 2 else reversed(sides):
                found[model][side].append(await _turn(str(model_folder(model)), prepared=_SIDES[side]))
                progress(f"round {number + 1}, {model}, {side}: {found[model][side][-1]}")
    for model, by_side in found.items():
        _show(model, by_side)
    return {"rounds": found}


async def _turn(model: str, *, prepared: bool) -> Figures:
    settings = {"VllmWorker.prepared-weights": prepared, "VllmWorker.ServiceArgs.workers": 1}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), model, "agg", settings)
        async with running(server), PresenceLog(server) as log:
            await server.ready()
            first = await log.ready_worker()
            assert server.state_root is not None
            paths = StatePaths(server.state_root, NAMESPACE)
            if prepared:
                await _prepared(paths)
            added = [await _one_more(server) for _ in range(_ADDED)]
            return {**_lists(added), "replaced_s": [await _replaced(log, first.pid)]}


async def _prepared(paths: StatePaths) -> None:
    path = paths.prepared_socket(str(Watcher(NAMESPACE, "VllmWorker")))
    deadline = time.monotonic() + _PREPARED_WITHIN_S
    while not path.exists():  # a foreign process
        if time.monotonic() > deadline:
            raise ServerError(f"no process has loaded the weights within {_PREPARED_WITHIN_S:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)


async def _one_more(server: Server) -> dict[str, float]:
    added = await one_more(server)
    await server.dynamo("drain", added.watcher)
    return {"worker_s": added.took_s, "worker_cpu_s": added.cpu_s, "memory_mib": added.memory_mib}


async def _replaced(log: PresenceLog, pid: int) -> float:
    """Seconds from its death until the next one is ready, with the pause before a restart."""
    known, killed = frozenset(log.latest()), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await log.ready_worker(known)
    return time.monotonic() - killed


def _lists(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def _show(model: str, by_side: dict[str, list[Figures]]) -> None:
    def interval(turns: Sequence[Figures], key: str) -> str:
        values = [value for turn in turns for value in turn[key]]
        return bootstrap(values).shown(2 if key.endswith("_s") else 0)

    rows = [[name, *(interval(turns, key) for turns in by_side.values())] for key, name in _ROWS.items()]
    table(f"One more worker, {model}", ("", *(f"{side} prepared-weights" for side in by_side)), rows)
