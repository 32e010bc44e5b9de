"""What the gateway adds to the time to first token of a busy engine, against vLLM's own server.

A request that arrives during a step waits for its end, and that chance is many times larger than what a gateway adds.
So chance is taken out of it: while the other streams decode, one request after another, of a single token, is sent at
phases of the step that cover it evenly (a van der Corput sequence), the same ones on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import usage
from benchmarks.harness.calm import CALM_CORES, Patience
from benchmarks.harness.client import Completion
from benchmarks.harness.load import client_of, prompt
from benchmarks.harness.models import HEAVY, MODELS, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import Server, running, spread_over_cores, start_ours, start_vllm
from benchmarks.harness.spread import Interval, bootstrap, median

SUMMARY = "what is added to the time to first token of a busy engine, with chance taken out"
ENGINE_CORE = 0
_STREAMS = (16, 48)
_PATIENCE_S = 60.0
_SETTLE_S = 1.0
_BACKGROUND_TOKENS = 2000
"""More than a stream can get in a turn."""
_HEADERS = (
    "streams",
    "rounds",
    "requests a side",
    "step ms",
    "TTFT ms vLLM",
    "ours",
    "added ms [95 %]",
    "at equal steps",
    "foreign cores",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=HEAVY)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side at each number of streams")
    parser.add_argument("--probes", type=int, default=64, help="single-token requests in a turn")
    parser.add_argument("--streams", type=int, nargs="+", default=list(_STREAMS))


@dataclass(frozen=True)
class Turn:
    """A side's turn. Times are in seconds."""

    ttfts_s: tuple[float, ...]
    step_s: float
    foreign_cores: float

    @property
    def mean_ttft_s(self) -> float:
        """The mean: phases are covered evenly, so it holds half a step of waiting on both sides."""
        return statistics.fmean(self.ttfts_s)


@dataclass(frozen=True)
class Pair:
    """A pair of neighbouring turns."""

    ours: Turn
    theirs: Turn

    @property
    def added_s(self) -> float:
        return self.ours.mean_ttft_s - self.theirs.mean_ttft_s

    @property
    def added_at_equal_steps_s(self) -> float:
        """The same if vLLM's engine had been as fast as ours was in its turn. A step varies from turn to turn by more
        than a gateway adds, and a first token takes the rest of one step and a step of its own, so that all but the
        gateway's part of it is in proportion to the step."""
        return self.ours.mean_ttft_s - self.theirs.mean_ttft_s * self.ours.step_s / self.theirs.step_s

    @property
    def foreign_cores(self) -> float:
        return max(self.ours.foreign_cores, self.theirs.foreign_cores)


def phases() -> Iterator[float]:
    """0 to 1, each prefix spread evenly: the bits of a counter, mirrored at the point (van der Corput, base 2)."""
    number = 0
    while True:
        number += 1
        yield int(f"{number:032b}"[::-1], 2) / 2**32


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds, probes = (1, 8) if arguments.quick else (arguments.rounds, arguments.probes)
    folder = str(model_folder(arguments.model))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        theirs = start_vllm(Path(scratch), folder, ENGINE_CORE)
        ours = start_ours(Path(scratch), folder, "agg", {})
        async with running(theirs, ours):
            progress("waiting for both servers")
            await asyncio.gather(theirs.ready(), ours.ready())
            spread_over_cores([theirs, ours], ENGINE_CORE)
            patience = Patience(0 if arguments.quick else _PATIENCE_S)
            pairs = {n: await _pairs(ours, theirs, n, rounds, probes, patience) for n in arguments.streams}
    return _report(arguments.model, pairs)


async def _pairs(
    ours: Server, theirs: Server, streams: int, rounds: int, probes: int, patience: Patience
) -> list[Pair]:
    """The calmest rounds of as many as it takes, half as many again at most."""
    pairs: list[Pair] = []
    for number in range(rounds + (rounds + 1) // 2):
        if sum(pair.foreign_cores < CALM_CORES for pair in pairs) >= rounds:
            break
        turns: dict[str, Turn] = {}
        await patience.wait((*ours.processes, *theirs.processes))
        # ABBA: whatever drifts favours neither side.
        for server in (ours, theirs) if number % 2 else (theirs, ours):
            turns[server.name] = await _turn(server, streams, probes, seed=1000 * streams + number)
            await asyncio.sleep(_SETTLE_S)
        pair = Pair(turns[ours.name], turns[theirs.name])
        pairs.append(pair)
        added = milliseconds(pair.added_s)
        progress(f"{streams} streams, round {number + 1}: {added} ms added; others used {pair.foreign_cores:.2f} cores")
    return sorted(pairs, key=lambda pair: pair.foreign_cores)[:rounds]


async def _turn(server: Server, streams: int, probes: int, seed: int) -> Turn:
    draw = random.Random(seed)
    others = [Completion() for _ in range(streams - 1)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_decode(server, answer, prompt(draw, 1))) for answer in others]
        await _all_decode(others)
        before, begun = usage(server.processes), time.monotonic()
        ttfts = await _probe(server, others, probes, draw)
        used = usage(server.processes).since(before)
        for task in tasks:
            task.cancel()
    return Turn(tuple(ttfts), _step_s(others, begun), used.foreign_cores)


async def _decode(server: Server, answer: Completion, text: str) -> None:
    async with client_of(server) as client:
        await client.complete(text, _BACKGROUND_TOKENS, answer)


async def _all_decode(answers: Sequence[Completion]) -> None:
    async with asyncio.timeout(120):
        while not all(len(answer.chunks_s) > 3 for answer in answers):  # noqa: ASYNC110  # filled by a protocol
            await asyncio.sleep(0.05)


async def _probe(server: Server, others: Sequence[Completion], probes: int, draw: random.Random) -> list[float]:
    ttfts: list[float] = []
    async with client_of(server) as client:
        phase = phases()
        while len(ttfts) < probes:
            step_s = _step_s(others, time.monotonic() - 5.0)
            await _until_phase(others, step_s, next(phase))
            answer = await client.complete(prompt(draw, 1), 1)
            if answer.ttft_s is None or answer.failure:
                raise ValueError(f"{server.name} failed a request: {answer.failure}")
            ttfts.append(answer.ttft_s)
    return ttfts


async def _until_phase(others: Sequence[Completion], step_s: float, phase: float) -> None:
    """Wait for that phase of a step: 0 is the moment at which the tokens of the last one arrive."""
    now, last = time.monotonic(), max(answer.chunks_s[-1] for answer in others)
    ahead_s = (last + phase * step_s - now) % step_s
    await asyncio.sleep(ahead_s)


def _step_s(answers: Sequence[Completion], since: float) -> float:
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in itertools.pairwise(answer.chunks_s)
        if earlier >= since
    ]
    return median(gaps) if gaps else 0.1


def _report(model: str, pairs: dict[int, list[Pair]]) -> Figures:
    results = {streams: _compare(turns) for streams, turns in pairs.items()}
    table(f"Model {model}", _HEADERS, [_row(streams, result) for streams, result in results.items()])
    return {"model": model, "streams": {str(streams): result for streams, result in results.items()}}


def _compare(pairs: Sequence[Pair]) -> Figures:
    return {
        "rounds": len(pairs),
        "requests": sum(len(pair.ours.ttfts_s) for pair in pairs),
        "step_s": median([turn.step_s for pair in pairs for turn in (pair.ours, pair.theirs)]),
        "ttft_s": {
            "vllm": statistics.fmean(pair.theirs.mean_ttft_s for pair in pairs),
            "ours": statistics.fmean(pair.ours.mean_ttft_s for pair in pairs),
        },
        "added_s": vars(bootstrap([pair.added_s for pair in pairs], statistics.fmean)),
        "added_by_round_s": [pair.added_s for pair in pairs],
        "added_at_equal_steps_s": vars(bootstrap([pair.added_at_equal_steps_s for pair in pairs], statistics.fmean)),
        "step_ratio_by_round": [pair.ours.step_s / pair.theirs.step_s for pair in pairs],
        "foreign_cores": max(pair.foreign_cores for pair in pairs),
    }


def _row(streams: int, result: Figures) -> list[str]:
    return [
        str(streams),
        str(result["rounds"]),
        str(result["requests"]),
        milliseconds(result["step_s"]),
        milliseconds(result["ttft_s"]["vllm"]),
        milliseconds(result["ttft_s"]["ours"]),
        _shown_ms(result["added_s"]),
        _shown_ms(result["added_at_equal_steps_s"]),
        f"{result['foreign_cores']:.2f}",
    ]


def _shown_ms(seconds: dict[str, float]) -> str:
    return Interval(**{key: value * 1e3 for key, value in seconds.items()}).shown(1)
