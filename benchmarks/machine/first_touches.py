"""What the first requests after a start pay for KV memory that the start has left untouched.

The kernel makes a page of the KV cache when a block is written for the first time. Compared is an engine for which all
of it was written at its start: of `--against`, a checkout that leaves `zero_kv_at_first_use()` out, or with
`cpu-tuning: false`, which leaves out more than that. Servers take turns.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.load import LETTERS, client_of
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import ROOT, ServerError, running, start_ours
from benchmarks.harness.spread import bootstrap, median, quantile

SUMMARY = "time to first token of the first hundred requests after a start, against KV memory zeroed at the start"
REQUESTS = 100
_FEWEST, _MOST = 16, 900
"""Tokens of a prompt."""
_FIRST_USE, _AT_START = "at first use", "at the start"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="starts of each side (5)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="the other side (cpu-tuning: false)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    found: dict[str, list[list[float]]] = {_FIRST_USE: [], _AT_START: []}
    for number in range(arguments.rounds or (1 if arguments.quick else 5)):
        sides = list(found)
        for side in sides if number % 2 else reversed(sides):
            against = arguments.against if side == _AT_START else None
            tuned = side == _FIRST_USE or against is not None
            found[side].append(await _first_requests(against or ROOT, tuned=tuned, seed=number))
            progress(f"round {number + 1}, {side}: p99 {milliseconds(quantile(found[side][-1], 0.99))} ms")
    return _report(found)


async def _first_requests(project: Path, *, tuned: bool, seed: int) -> list[float]:
    """Seconds to the first token of each request, in their order."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        settings = {"VllmWorker.cpu-tuning": tuned}
        server = start_ours(Path(scratch), str(model_folder(RANDOM)), "agg", settings, checkout=project)
        async with running(server), client_of(server, temperature=0) as client:
            await server.ready()
            taken: list[float] = []
            for _ in range(REQUESTS):
                prompt = "".join(map(chr, draw.choices(LETTERS, k=draw.randint(_FEWEST, _MOST))))
                answer = await client.complete(prompt, 1)
                if answer.ttft_s is None:
                    raise ServerError(f"{server.name} did not answer: {answer.failure}")
                taken.append(answer.ttft_s)
            return taken


def _report(found: dict[str, list[list[float]]]) -> Figures:
    def row(name: str, rounds: Sequence[Sequence[float]]) -> list[str]:
        longest = bootstrap([1e3 * quantile(each, 0.99) for each in rounds])
        first = median([each[0] for each in rounds])
        every = [one for each in rounds for one in each]
        return [name, *map(milliseconds, (first, median(every), quantile(every, 0.99))), longest.shown(1)]

    headers = ("KV memory zeroed", "first request", "median", "p99 of all", "p99 of a start [95 %]")
    table(f"First token of the first {REQUESTS} requests, ms", headers, [row(*side) for side in found.items()])
    return {"ttft_s": found}
