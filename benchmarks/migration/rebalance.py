"""What rebalancing does when workers are added to full ones: the same requests with it and without.

A turn begins with too few workers for its load, and answers of very different lengths: both run full, let requests wait
and preempt others. Then as many workers again are added, as a planner would. New requests go to these; those that are
there already stay where they are, unless they are rebalanced.

Real are `dynamo serve` of the example graph with frontend, router, NATS, every worker process, `dynamo scale`, and the
time that passes. Pretended are the engines: mockers with the times of planner/fleet.py and a small KV cache, so that
fewer streams fill it. The arms take turns on one server, and differ by a live setting alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import usage
from benchmarks.harness.generated import client_of, generator_of
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, progress
from benchmarks.harness.servers import (
    NAMESPACE,
    Server,
    ServerError,
    add_override,
    parse_overrides,
    running,
    start_ours,
)
from benchmarks.migration.rebalance_report import PREEMPTIONS, Arm, Turn, report, told
from benchmarks.planner.fleet import PROFILE
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import SET_SETTING
from dynamo_local.load.workload import Gamma, Lengthwise, PowerLaw, Uniform, drawn
from state.paths import StatePaths

SUMMARY = "workers are added to full ones: the same requests with rebalancing and without"
FEW, MANY = 2, 4
"""Workers when a turn begins, and after a third of it."""
KV_BLOCKS = 256
SHAPE = Lengthwise(Uniform(100, 500), PowerLaw(1.0, 40, 1200))
_RATE = 4.0
_SECONDS = 40.0
_ROUNDS = 2
_QUICK_SECONDS = 15.0
_IDLE_WITHIN_S = 10.0
_SCALED_WITHIN_S = 60.0
_SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns of each arm ({_ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"for which requests arrive in a turn ({_SECONDS:g})")
    parser.add_argument("--rate", type=float, default=_RATE, help="requests/s")
    parser.add_argument("--seed", type=int, default=1, help="of the first round's load")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    seconds = arguments.seconds or (_QUICK_SECONDS if arguments.quick else _SECONDS)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = _start(Path(scratch), parse_overrides(arguments.override))
        async with running(server):
            await server.ready()
            progress("ready")
            for number in range(rounds):
                # ABBA: whatever drifts favours neither arm.
                arms: tuple[Arm, ...] = ("off", "on") if number % 2 == 0 else ("on", "off")
                for arm in arms:
                    turns.append(await _turn(server, arm, arguments.rate, seconds, arguments.seed + number))
                    progress(told(turns[-1]))
    return report(turns)


def _start(folder: Path, more: dict[str, str]) -> Server:
    worker = PROFILE | {"mocker-kv-blocks": KV_BLOCKS}
    worker.pop("prefill-batch")
    settings: dict[str, Any] = {
        "cpu-slots": MANY,
        "Frontend.max-model-len": PROFILE["mocker-max-model-len"],
        **{f"VllmWorker.{key}": value for key, value in worker.items()},
        "VllmWorker.ServiceArgs.workers": FEW,
    }
    return start_ours(folder, str(model_folder(RANDOM)), "agg_router", settings | more)


async def _turn(server: Server, arm: Arm, rate: float, seconds: float, seed: int) -> Turn:
    """The requests that the seed draws, each at its time, and all their answers."""
    assert server.state_root is not None
    control = ControlClient(StatePaths(server.state_root, NAMESPACE))
    await asyncio.to_thread(control.do, SET_SETTING, {"value": int(arm == "on")}, key="rebalance")
    await _idle(server)
    await _scale(server, FEW)
    before, busy = await _counters(server), usage(())
    async with client_of(server) as client, asyncio.TaskGroup() as group:
        generator = generator_of(client, 2 * seed + (arm == "on"))
        group.create_task(generator.open_loop(drawn(Gamma(rate), SHAPE, seconds, seed)))
        await asyncio.sleep(seconds / 3)
        await _scale(server, MANY)
    used = usage(()).since(busy)
    after = await _counters(server)
    counted = {name: round(count - before.get(name, 0)) for name, count in after.items()}
    return Turn(arm, seed, tuple(generator.records), counted, used.busy_s / used.at)


async def _scale(server: Server, workers: int) -> None:
    """As an operator does it."""
    command = ["scale", f"VllmWorker={workers}", f"--namespace={NAMESPACE}"]
    environ = {**os.environ, "DYN_LOCAL_STATE_DIR": str(server.state_root)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamo_local.cli.main", *command, env=environ, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_SCALED_WITHIN_S):
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if status != 0:
        raise ServerError(f"dynamo {' '.join(command)} ended with {status}")


async def _idle(server: Server) -> None:
    """Wait until all workers say that they have nothing to do."""
    async with asyncio.timeout(_IDLE_WITHIN_S):
        while any((await _metric(server, "dynamo_worker_kv_usage_ratio")).values()):  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.1)


async def _counters(server: Server) -> dict[str, float]:
    """Moves by how they ended and why they began, and preemptions."""
    moves = await _metric(server, "dynamo_migrations_total")
    preemptions = await _metric(server, "vllm:num_preemptions_total")
    return {**moves, PREEMPTIONS: sum(preemptions.values())}


async def _metric(server: Server, name: str) -> dict[str, float]:
    """See `samples_of`."""
    return samples_of((await server.get("/metrics")).decode(), name)


def samples_of(metrics: str, name: str) -> dict[str, float]:
    """The samples of that name in the text that Prometheus reads, by the values of their labels but the model."""
    return {
        " ".join(value for label, value in _LABEL.findall(labels) if label != "model"): float(value)
        for found, labels, value in _SAMPLE.findall(metrics)
        if found == name
    }
