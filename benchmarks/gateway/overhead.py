"""What serving through this project costs, against vLLM's own server, or another revision: throughput, time to first
token, CPU.

Both servers are loaded; they take turns of a few seconds with the same requests, so that only one engine decodes at
a time and both see the same noise. Their engines are bound to one and the same core, all other processes and the
client to the remaining ones. Of all rounds those count during which others used the machine least.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import CLIENT, add
from benchmarks.harness.calm import CALM_CORES, Patience
from benchmarks.harness.load import Load, Shape, closed_loop, pooled_gaps
from benchmarks.harness.models import HEAVY, MODELS, RANDOM, SMOLLM2, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import (
    BESIDE,
    Server,
    add_beside,
    add_override,
    in_turn,
    parse_overrides,
    running,
    spread_over_cores,
    start_ours,
    start_vllm,
)
from benchmarks.harness.spread import Interval, bootstrap, median, quantile

SUMMARY = "throughput, time to first token and CPU per token, against vLLM's own server"
ENGINE_CORE = 0
_WARM_UP_S = 2.0
_STREAMS = (1, 16, 48)
_SLOW = Shape(prompt_words=1, min_tokens=8, max_tokens=24)
_SHAPES = {RANDOM: Shape(), HEAVY: _SLOW, SMOLLM2: _SLOW}
_ROUNDS = {RANDOM: 6, HEAVY: 4, SMOLLM2: 4}


_PATIENCE_S = 60.0
_SETTLE_S = 2.0
"""vLLM's own server computes for a second when it has nothing to do any more: it looks whether something comes."""


def _headers(other: str) -> list[str]:
    compared = (("tokens/s", "ratio [95 %]"), ("TTFT ms", "added ms [95 %]"))
    rates = [header for what, difference in compared for header in (f"{what} {other}", "ours", difference)]
    return ["streams", *rates, f"step / p99 gap ms {other}", "ours", "foreign cores", f"failed {other}/ours"]


def _turn_s(model: str, streams: int) -> float:
    """Long enough for several requests of each stream."""
    return 2.5 if model == RANDOM else 3.0 + streams / 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--rounds", type=int, help="turns of each side at each number of streams")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    add_beside(parser)
    add_override(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=list(_STREAMS))


@dataclass(frozen=True)
class Pair:
    """A pair of neighbouring turns with the same requests."""

    theirs: Load
    ours: Load

    @property
    def throughput_ratio(self) -> float:
        return self.ours.tokens_per_s / self.theirs.tokens_per_s

    @property
    def added_ttft_s(self) -> float:
        return median(self.ours.ttfts_s) - median(self.theirs.ttfts_s)

    @property
    def foreign_cores(self) -> float:
        return max(load.used.foreign_cores for load in (self.ours, self.theirs))

    @property
    def is_usable(self) -> bool:
        return all(load.ttfts_s and load.tokens_per_s > 0 for load in (self.ours, self.theirs))


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (2 if arguments.quick else _ROUNDS[arguments.model])
    folder = str(model_folder(arguments.model))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        overrides = parse_overrides(arguments.override)
        ours = start_ours(Path(scratch, "ours"), folder, "agg", overrides)
        if arguments.beside:
            theirs = start_ours(Path(scratch, BESIDE), folder, "agg", overrides, checkout=arguments.beside)
        else:
            theirs = start_vllm(Path(scratch), folder, ENGINE_CORE)
        async with running(theirs, ours):
            progress("waiting for both servers")
            await asyncio.gather(theirs.ready(), ours.ready())
            spread_over_cores([theirs, ours], ENGINE_CORE)
            await _warm_up(theirs, ours)
            patience = Patience(0 if arguments.quick else _PATIENCE_S)
            pairs = {n: await _pairs(ours, theirs, n, rounds, patience, arguments) for n in arguments.streams}
    return _report(arguments.model, BESIDE if arguments.beside else "vLLM", pairs)


async def _warm_up(*servers: Server) -> None:
    for server in servers:
        await closed_loop(server, streams=8, seconds=_WARM_UP_S, seed=-1, shape=Shape())
        await asyncio.sleep(_SETTLE_S)


async def _pairs(
    ours: Server, theirs: Server, streams: int, rounds: int, patience: Patience, arguments: argparse.Namespace
) -> list[Pair]:
    """The calmest rounds of as many as it takes, half as many again at most."""
    seconds = arguments.seconds or _turn_s(arguments.model, streams)
    shape = _SHAPES[arguments.model]
    pairs: list[Pair] = []
    for number in range(rounds + (rounds + 1) // 2):
        if sum(pair.foreign_cores < CALM_CORES for pair in pairs) >= rounds:
            break
        loads: list[Load] = []
        await patience.wait((*ours.processes, *theirs.processes))
        for server in in_turn((theirs, ours), number):
            seed = 1000 * streams + number
            loads.append(await closed_loop(server, streams=streams, seconds=seconds, seed=seed, shape=shape))
            await asyncio.sleep(_SETTLE_S)
        pair = Pair(*in_turn(loads, number))
        pairs.append(pair)
        progress(_told(streams, number, theirs.name, pair))
    return sorted(pairs, key=lambda pair: pair.foreign_cores)[:rounds]


def _told(streams: int, number: int, other: str, pair: Pair) -> str:
    rates = f"{pair.theirs.tokens_per_s:.0f} tokens/s by {other}, {pair.ours.tokens_per_s:.0f} by ours"
    failed = len(pair.ours.failures) + len(pair.theirs.failures)
    return (
        f"{streams} streams, round {number + 1}: {rates}; others used {pair.foreign_cores:.2f} cores; {failed} failures"
    )


def _report(model: str, other: str, pairs: dict[int, list[Pair]]) -> Figures:
    usable = {streams: [pair for pair in turns if pair.is_usable] for streams, turns in pairs.items()}
    results = {streams: _compare(other, turns) for streams, turns in usable.items() if turns}
    for streams in sorted(pairs.keys() - results.keys()):
        progress(f"{streams} streams: no round could be used; make the turns longer")
    table(f"Model {model}", _headers(other), [_row(streams, result) for streams, result in results.items()])
    for streams in results:
        _cpu_table(streams, other, results[streams]["cpu_us_per_token"])
    return {"model": model, "streams": {str(streams): result for streams, result in results.items()}}


def _compare(other: str, pairs: Sequence[Pair]) -> Figures:
    sides = {other.lower(): [pair.theirs for pair in pairs], "ours": [pair.ours for pair in pairs]}
    ratio = bootstrap([pair.throughput_ratio for pair in pairs])
    added = bootstrap([pair.added_ttft_s for pair in pairs])
    return {
        "rounds": len(pairs),
        "tokens_per_s": {name: median([load.tokens_per_s for load in loads]) for name, loads in sides.items()},
        "throughput_ratio": vars(ratio),
        "throughput_ratios": [pair.throughput_ratio for pair in pairs],
        "ttft_s": {name: median([t for load in loads for t in load.ttfts_s]) for name, loads in sides.items()},
        "added_ttft_s": vars(added),
        "gap_s": {name: _gaps(loads) for name, loads in sides.items()},
        "cpu_us_per_token": {name: _cpu_per_token(loads) for name, loads in sides.items()},
        "foreign_cores": {name: median([load.used.foreign_cores for load in loads]) for name, loads in sides.items()},
        "failures": {name: [why for load in loads for why in load.failures] for name, loads in sides.items()},
    }


def _gaps(loads: Sequence[Load]) -> Figures:
    """Seconds between tokens: the mean of a stream, in the median, and the longest but one in a hundred."""
    gaps, steps = pooled_gaps(loads), [step for load in loads for step in load.steps_s]
    return {"step": median(steps), "p99": quantile(gaps, 0.99)} if gaps and steps else {}


def _cpu_per_token(loads: Sequence[Load]) -> dict[str, float]:
    """Microseconds of CPU for each token, by process."""
    tokens = sum(load.tokens for load in loads)
    roles = add(load.used for load in loads).roles
    return {role: 1e6 * spent / tokens for role, spent in roles.items()} if tokens else {}


def _row(streams: int, result: Figures) -> list[str]:
    rates, ttfts, failures = (result[key].values() for key in ("tokens_per_s", "ttft_s", "failures"))
    added = Interval(**{key: value * 1e3 for key, value in result["added_ttft_s"].items()})
    gaps = [f"{milliseconds(gap.get('step'))} / {milliseconds(gap.get('p99'))}" for gap in result["gap_s"].values()]
    return [
        str(streams),
        *(f"{rate:.0f}" for rate in rates),
        Interval(**result["throughput_ratio"]).shown(3),
        *(milliseconds(ttft) for ttft in ttfts),
        added.shown(1),
        *gaps,
        f"{max(result['foreign_cores'].values()):.2f}",
        " / ".join(str(len(each)) for each in failures),
    ]


def _cpu_table(streams: int, other: str, costs: dict[str, dict[str, float]]) -> None:
    roles = [role for role in dict.fromkeys(role for side in costs.values() for role in side) if role != CLIENT]
    rows = [[role, *(f"{costs[side][role]:.0f}" if role in costs[side] else "" for side in costs)] for role in roles]
    totals = [f"{sum(cost for role, cost in costs[side].items() if role != CLIENT):.0f}" for side in costs]
    rows += [["all", *totals], ["(the client)", *(f"{costs[side].get(CLIENT, 0):.0f}" for side in costs)]]
    table(f"CPU microseconds per token at {streams} streams", ("process", other, "ours"), rows)
