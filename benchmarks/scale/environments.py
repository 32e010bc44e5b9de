"""What it costs that workers live on a Ray cluster and not on the server's own machine, with mockers or real vLLM.

Two servers run side by side. In turns, each answers requests of a single token, one after another: the time to it, and
the CPU time that its processes take for it, those on nodes included. Then each adds two workers, one after the other:
on the cluster the first one is alone on its node, where a node server has to start. With real vLLM its fork server
starts there as well; so the fork server here is killed before the first one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import Process, descendants, usage
from benchmarks.harness.load import client_of, prompt
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.raylets import Raylets, raylet_pid, raylets
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import (
    SMALL_ENGINE,
    Server,
    ServerError,
    add_project,
    running,
    start_ours,
)
from benchmarks.harness.spread import bootstrap, median

SUMMARY = "time and CPU to the first token, and starts of workers, on a Ray cluster against this machine"
_ROUNDS, _PROBES, _STARTS = 10, 60, 3
_WORKERS = 2
_SERVICE = "VllmWorker"
_NODES = (0, 2, 3)
"""Cores of the nodes. The first workers fill the second one, which has the least room for them."""

_PARTS = {"ttft_s": "time to the first token, ms", "cpu_s": "CPU time of a request, ms"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="turns of each side")
    parser.add_argument("--starts", type=int, default=_STARTS, help="times that each side adds two workers")
    parser.add_argument("--vllm", action="store_true", help="real vLLM; the first start here is without a fork server")
    add_project(parser)


@dataclass
class Side:
    """A server. `cluster`: of its workers; None: they are its own children."""

    name: str
    server: Server
    cluster: Raylets | None = None

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes of the server, and what Ray has started for it."""
        raylets = () if self.cluster is None else map(raylet_pid, self.cluster.nodes)
        found = {process for raylet in raylets for process in descendants(raylet) if process.pid != raylet}
        return (*descendants(self.server.popen.pid), *found)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds, starts = (2, 1) if arguments.quick else (arguments.rounds, arguments.starts)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as scratch,
        raylets(0, Path(scratch), project=arguments.project) as cluster,
    ):
        for cores in _NODES:
            cluster.add(cores)
        here, there = ["--cpu-slots", str(sum(_NODES))], ["--environment", "ray", "--address", cluster.address]
        near, far = _started(Path(scratch) / "near", here, arguments), _started(Path(scratch) / "far", there, arguments)
        async with running(near, far):
            sides = [Side("local", near), Side("ray", far, cluster)]
            for side in sides:
                await side.server.ready()
            turns = await _turns(sides, rounds)
            added = await _starts(sides, starts, cold=arguments.vllm)
    return _report(turns, added)


def _started(folder: Path, options: Sequence[str], arguments: argparse.Namespace) -> Server:
    folder.mkdir()
    overrides: dict[str, object] = {f"{_SERVICE}.ServiceArgs.workers": _WORKERS}
    if arguments.vllm:
        overrides |= {f"{_SERVICE}.{key}": value for key, value in SMALL_ENGINE.items()}
    else:
        overrides |= {f"{_SERVICE}.engine": "mocker", f"{_SERVICE}.mocker-step-base-ms": 1}
    return start_ours(folder, str(model_folder(RANDOM)), "agg_router", overrides, options, arguments.project)


async def _turns(sides: Sequence[Side], rounds: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for number in range(-1, rounds):
        # The first turn only warms up. ABBA: whatever drifts favours neither side.
        for side in sides if number % 2 else reversed(sides):
            turn = await _turn(side, number)
            if number >= 0:
                found[side.name].append(turn)
    return found


async def _turn(side: Side, seed: int) -> Figures:
    draw, ttfts, processes = random.Random(seed), [], side.processes
    before = usage(processes)
    async with client_of(side.server) as client:
        for _ in range(_PROBES):
            answer = await client.complete(prompt(draw, 1), 1)
            if answer.ttft_s is None or answer.failure:
                raise ServerError(f"{side.name} failed a request: {answer.failure}")
            ttfts.append(answer.ttft_s)
    roles = usage(processes).since(before).roles
    cpu_s = sum(spent for role, spent in roles.items() if role != "client")
    return {"ttft_s": median(ttfts), "cpu_s": cpu_s / _PROBES}


async def _starts(sides: Sequence[Side], starts: int, *, cold: bool) -> dict[str, list[list[float]]]:
    """Seconds until the first and the second worker that each side adds is ready. `cold`: the first one here finds no
    fork server, as on a node."""
    found: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in range(starts):
        for side in sides if number % 2 else reversed(sides):
            added = []
            if cold and side.cluster is None:
                _kill_forkserver(side.server)
            for more in (1, 2):
                began = time.monotonic()
                (outcome,) = await side.server.dynamo("scale", f"{_SERVICE}={_WORKERS + more}")
                added.append((outcome["watcher"], time.monotonic() - began))
            found[side.name].append([took_s for _, took_s in added])
            for watcher, _ in added:
                await side.server.dynamo("drain", watcher)
            progress(f"{side.name}: one more worker after {', '.join(f'{took_s:.2f} s' for _, took_s in added)}")
    return found


def _kill_forkserver(server: Server) -> None:
    """And its spare: the next one imports anew."""
    server.refresh()
    for process in server.of_role("forkserver"):
        os.kill(process.pid, signal.SIGKILL)


def _report(turns: dict[str, list[Figures]], added: dict[str, list[list[float]]]) -> Figures:
    near, far = turns.values()
    rows = []
    for part, name in _PARTS.items() if near else ():
        differences = [1e3 * (there[part] - here[part]) for here, there in zip(near, far, strict=True)]
        means = [f"{1e3 * statistics.fmean(turn[part] for turn in side):.2f}" for side in (near, far)]
        rows.append((name, *means, bootstrap(differences).shown()))
    if rows:
        table(f"A request of one token, {len(near)} turns", ("", *turns, "added [95 %]"), rows)
    starts = [
        (name, *(f"{median([took[index] for took in side]):.2f}" for side in added.values()))
        for index, name in enumerate(("first (on its node)", "second (on the same node)"))
    ]
    table("One more worker, s", ("", *added), starts)
    return {"turns": turns, "added_s": added}
