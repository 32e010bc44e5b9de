"""API keys: CPU of a request with one, what the time of a wrong key tells, and limits under kills of the frontend."""

from __future__ import annotations

import argparse

from benchmarks.harness.report import Figures, progress
from benchmarks.keys import cost, limits

SUMMARY = "API keys: CPU of checking one and its limits, and limits while frontends are killed"
STEPS = ("cost", "limits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help="of " + ", ".join(STEPS)
    )
    parser.add_argument("--requests", type=int, help="of the step limits (10000)")
    parser.add_argument("--keys", type=int, default=50, help="of the step limits (50)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills of the frontend (15)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    quick, figures = arguments.quick, Figures()
    for step in arguments.steps:
        progress(step)
        if step == "cost":
            figures[step] = await cost.measure(3 if quick else 10, 2_000 if quick else 20_000)
        else:
            requests = arguments.requests or (1_000 if quick else 10_000)
            figures[step] = await limits.measure(requests, arguments.keys, arguments.every)
    return figures
