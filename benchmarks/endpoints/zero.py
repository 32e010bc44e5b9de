"""Endpoints without a minimum of workers, on real processes with mockers: many requests at once, turns, many cycles."""

from __future__ import annotations

import argparse

from benchmarks.endpoints import crowd, cycles, real_turns
from benchmarks.harness.report import Figures, progress

SUMMARY = "from zero, real processes: 100 requests at once, 20 endpoints on two devices, 1,000 cycles of park and wake"
STEPS = ("crowd", "turns", "cycles")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help="of " + ", ".join(STEPS)
    )
    parser.add_argument("--requests", type=int, default=100, help="at once, in step crowd (100)")
    parser.add_argument("--rounds", type=int, help="of step crowd (5)")
    parser.add_argument("--endpoints", type=int, default=20, help="in step turns (20)")
    parser.add_argument("--devices", type=int, default=2, help="in step turns (2)")
    parser.add_argument("--duration", type=float, help="of the arrivals in step turns, in s (600)")
    parser.add_argument("--rate", type=float, default=0.5, help="of the arrivals in step turns, per second (0.5)")
    parser.add_argument("--seed", type=int, default=1, help="of step turns (1)")
    parser.add_argument("--cycles", type=int, help="in step cycles (1000)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    quick, figures = arguments.quick, Figures()
    for step in arguments.steps:
        progress(step)
        if step == "crowd":
            figures[step] = await crowd.measure(arguments.rounds or (1 if quick else 5), arguments.requests)
        elif step == "turns":
            load = real_turns.RandomLoad(
                arguments.rate, arguments.duration or (60.0 if quick else 600.0), arguments.seed
            )
            figures[step] = await real_turns.measure(arguments.endpoints, arguments.devices, load)
        else:
            figures[step] = await cycles.measure(arguments.cycles or (20 if quick else 1000))
    return figures
