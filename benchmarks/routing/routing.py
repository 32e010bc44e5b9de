"""Routing: simulated fleets, and what a decision costs."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.harness.report import Figures
from benchmarks.routing import (
    agreement,
    bursts,
    cost,
    joining,
    joining_processes,
    priorities,
    pulling,
    rebalancing,
    simulated,
    thrash,
)
from dynamo_local.core.errors import UsageError

SUMMARY = "routing policies: reuse of caches and times to first token of simulated fleets, and what a decision costs"
STEPS = (
    "cost",
    "mooncake",
    "capacity",
    "shapes",
    "bursts",
    "bursts-processes",
    "rebalancing",
    "thrash",
    "joining",
    "joining-processes",
    "pulling",
    "agreement",
    "priorities",
    "dispatch",
)

_SERVED = {
    "agreement": agreement.measured,
    "bursts-processes": bursts.served,
    "joining-processes": joining_processes.measured,
    "pulling": pulling.measured,
}
"""Steps that start servers."""

_ALONE = {
    "cost": cost.decisions,
    "shapes": simulated.shapes,
    "bursts": bursts.measured,
    "rebalancing": rebalancing.judged,
    "thrash": thrash.measured,
    "joining": joining.measured,
    "priorities": priorities.measured,
    "dispatch": priorities.dispatched,
}
"""Steps that need no more than to know whether they are to be quick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["cost"], help="what to run (cost)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="for mooncake: conversation_trace.jsonl of https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)",
    )


async def run(arguments: argparse.Namespace) -> Figures:
    """Run the steps, print, and return the figures."""
    return {step: await _step(step, arguments) for step in arguments.steps}


async def _step(step: str, arguments: argparse.Namespace) -> Figures:
    if step in _SERVED:
        return await _SERVED[step](arguments.quick)
    return await asyncio.to_thread(_run, step, arguments)


def _run(step: str, arguments: argparse.Namespace) -> Figures:
    quick: bool = arguments.quick
    if step in _ALONE:
        return _ALONE[step](quick)
    if step == "capacity":
        return simulated.groups((20.0,) if quick else (20.0, 40.0, 60.0), 200 if quick else 1_500)
    if arguments.trace is None:
        raise UsageError("the step mooncake replays a trace", "name its file by --trace; --help says where it is")
    return simulated.replay(arguments.trace, (1.0,) if quick else (1.0, 5.0), 1_000 if quick else None)
