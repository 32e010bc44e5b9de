"""Endpoints that take turns on fewer devices, simulated: swaps and waits by the policy of core/endpoints/turns,
beside a schedule that knows all arrivals, and a lower bound of all schedules."""

from __future__ import annotations

import argparse
import random

import msgspec

from benchmarks.endpoints.turn_bounds import fewest_swaps, least_swaps
from benchmarks.endpoints.turn_world import Arrival, World
from benchmarks.harness.report import Figures, progress, table
from dynamo_local.core.endpoints.turns import PAUSE_S, TURN_S, Limits, longest_wait_s, take_turns

SUMMARY = "turns, simulated: 20 endpoints on two devices under random loads; swaps against a schedule that knows them"

_RATES = (0.1, 0.3, 1.0, 2.0)


class Case(msgspec.Struct, frozen=True):
    """A load that all policies serve. `offline`: the fewest swaps of a schedule that knows all arrivals, of those that
    let nobody wait longer than the policy did; `least`: fewer swaps need a longer wait. `bound_s`: on the wait. Times
    in seconds."""

    rate: float
    skewed: bool
    requests: int
    swaps: int
    offline: int
    least: float
    mean_wait_s: float
    longest_wait_s: float
    bound_s: float
    lost: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoints", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--duration", type=float, default=600, help="of the arrivals, in simulated s (600)")
    parser.add_argument("--request", type=float, default=1.0, help="mean duration of a request, in s (1)")
    parser.add_argument("--start", type=float, default=0.5, help="duration of a start, in s (0.5)")
    parser.add_argument("--turn", type=float, default=TURN_S, help=f"in s ({TURN_S:g})")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help=f"in s ({PAUSE_S:g})")
    parser.add_argument("--seed", type=int, default=1)


async def run(arguments: argparse.Namespace) -> Figures:
    """Simulate, print, and return the figures."""
    cases = []
    for skewed in (False, True):
        for rate in _RATES[:2] if arguments.quick else _RATES:
            cases.append(_case(arguments, rate, skewed=skewed))
            progress(f"{rate:g} requests a second: {cases[-1].swaps} swaps")
    _show(cases)
    return {"cases": [msgspec.to_builtins(case) for case in cases]}


def open_load(
    names: list[str], rate: float, duration_s: float, request_s: float, seed: int, *, skewed: bool
) -> list[Arrival]:
    """Poisson arrivals of exponential durations; `skewed`: the n-th is asked 1/n times as often as the first."""
    draw = random.Random(seed)
    weights = [1 / (number + 1) if skewed else 1.0 for number in range(len(names))]
    arrivals, now = [], draw.expovariate(rate)
    while now < duration_s:
        arrivals.append(Arrival(now, draw.choices(names, weights)[0], draw.expovariate(1 / request_s)))
        now += draw.expovariate(rate)
    return arrivals


def _case(arguments: argparse.Namespace, rate: float, *, skewed: bool) -> Case:
    names = [f"e{number}" for number in range(arguments.endpoints)]
    arrivals = open_load(names, rate, arguments.duration, arguments.request, arguments.seed, skewed=skewed)
    limits = Limits(arguments.turn, arguments.pause)
    world = World(names, arguments.devices, arguments.start)
    world.policy = lambda found, free, now: take_turns(found, free, now, limits)
    served = world.run(arrivals)
    longest = max(served.waits)
    bound = longest_wait_s(len(names) - 1, limits, max(one.runs_s for one in arrivals), arguments.start + world.end_s)
    return Case(
        rate,
        skewed,
        len(arrivals),
        len(served.swaps),
        min(len(served.swaps), fewest_swaps(world, arrivals, longest, arguments.turn) or len(served.swaps)),
        least_swaps(world, arrivals, longest),
        sum(served.waits) / len(served.waits),
        longest,
        bound,
        len(arrivals) - len(served.waits),
    )


def _show(cases: list[Case]) -> None:
    rows = [
        [
            f"{case.rate:g}/s{', skewed' if case.skewed else ''}",
            str(case.requests),
            str(case.lost),
            str(case.swaps),
            f"{case.offline} ({case.swaps / case.offline:.2f})",
            f"{case.least:.0f} ({case.swaps / case.least:.2f})",
            f"{case.mean_wait_s:.2f}",
            f"{case.longest_wait_s:.1f}",
            f"{case.bound_s:.0f}",
        ]
        for case in cases
    ]
    heads = [
        "load",
        "requests",
        "lost",
        "swaps",
        "offline (ratio)",
        "least (ratio)",
        "mean wait, s",
        "longest",
        "bound",
    ]
    table("Turns", heads, rows)
