"""Many endpoints on one server: what choosing among them costs, what having them costs, and how they are scaled."""

from __future__ import annotations

import argparse

from benchmarks.endpoints import choosing, cost, scaling
from benchmarks.harness.report import Figures, progress

SUMMARY = "endpoints: CPU of choosing among 20, their memory and start, and a step of load by two policies"
STEPS = ("choosing", "cost", "scaling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help="of " + ", ".join(STEPS)
    )
    parser.add_argument("--endpoints", type=int, default=20, help="for choosing and cost (20)")
    parser.add_argument("--rounds", type=int, help="of each step (2; 10 of choosing)")
    parser.add_argument("--workers", type=int, help="of the endpoint that is scaled, at most (8)")
    parser.add_argument("--adjustment", type=float, help="the planner's interval, in s (30)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    quick, figures = arguments.quick, Figures()
    rounds = arguments.rounds or (1 if quick else 2)
    for step in arguments.steps:
        progress(step)
        if step == "choosing":
            often, requests = arguments.rounds or (3 if quick else 10), 2_000 if quick else 20_000
            figures[step] = await choosing.measure(often, requests, arguments.endpoints)
        elif step == "cost":
            figures[step] = await cost.measure(rounds, min(arguments.endpoints, 5) if quick else arguments.endpoints)
        else:
            workers, adjustment = arguments.workers or (4 if quick else 8), arguments.adjustment or (5 if quick else 30)
            figures[step] = await scaling.measure(rounds, workers, adjustment)
    return figures
