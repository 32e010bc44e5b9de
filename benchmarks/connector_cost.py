"""What the KV connector costs a decode step of an engine that neither pulls nor is pulled from."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accounting import CLIENT, Usage, add, usage
from benchmarks.calm import Patience
from benchmarks.engines import BenchEngine
from benchmarks.report import Figures, milliseconds, progress, table
from benchmarks.spread import Interval, bootstrap, median

_PROMPT_TOKENS = 40
_TOKENS = 4000
"""Of all streams of a turn: it takes a second or so."""
_MOST_TOKENS, _LEAST_TOKENS = 300, 60


@dataclass(frozen=True)
class Turn:
    """One engine decoding streams that march in step."""

    steps_s: Sequence[float]
    """From one step with tokens of all streams to the next."""
    used: Usage

    @property
    def step_s(self) -> float:
        return median(self.steps_s)

    @property
    def mean_s(self) -> float:
        return sum(self.steps_s) / len(self.steps_s)

    @property
    def cpu_s(self) -> float:
        """Of the engine's processes, for each step."""
        return sum(spent for role, spent in self.used.roles.items() if role != CLIENT) / len(self.steps_s)


@dataclass(frozen=True)
class Pair:
    """Two neighbouring turns with the same requests."""

    off: Turn
    on: Turn


async def pairs(
    off: BenchEngine, on: BenchEngine, streams: Sequence[int], rounds: int, patience: Patience
) -> dict[int, list[Pair]]:
    """The engines take turns; whoever has not its turn is stopped."""
    for engine in (off, on):
        engine.pause()
    for engine in (off, on):
        await _turn(engine, max(streams), -1)
    found: dict[int, list[Pair]] = {count: [] for count in streams}
    for number, count in itertools.product(range(rounds), streams):
        await patience.wait((*off.processes, *on.processes))
        turns: dict[str, Turn] = {}
        # ABBA: whatever drifts favours neither side.
        for engine in (off, on) if number % 2 else (on, off):
            turns[engine.name] = await _turn(engine, count, number)
        pair = Pair(turns[off.name], turns[on.name])
        found[count].append(pair)
        shown = " / ".join(milliseconds(turn.step_s, 3) for turn in (pair.off, pair.on))
        progress(f"round {number + 1}, {count} streams: a step takes {shown} ms without / with the connector")
    return found


async def _turn(engine: BenchEngine, streams: int, seed: int) -> Turn:
    engine.wake()
    draw = random.Random(f"{streams}/{seed}")
    tokens = min(max(_TOKENS // streams, _LEAST_TOKENS), _MOST_TOKENS)
    prompts = [[draw.randrange(256) for _ in range(_PROMPT_TOKENS)] for _ in range(streams)]
    before = usage(engine.processes)
    requests = await asyncio.gather(*(engine.run(prompt, tokens) for prompt in prompts))
    used = usage(engine.processes).since(before)
    engine.pause()
    begin = max(request.times[0] for request in requests)
    end = min(request.times[-1] for request in requests)
    times = [at for at in requests[0].times if begin <= at <= end]
    return Turn([later - earlier for earlier, later in itertools.pairwise(times)], used)


_HEADERS = ("streams", "step ms off", "on", "on / off [95 %]", "of means [95 %]", "CPU of a step, on / off [95 %]")


def report(found: dict[int, list[Pair]]) -> Figures:
    results = {streams: _compare(each) for streams, each in found.items()}
    table("A decode step without and with the connector", _HEADERS, [_row(n, each) for n, each in results.items()])
    return {str(streams): result for streams, result in results.items()}


def _compare(each: Sequence[Pair]) -> Figures:
    return {
        "step_s": {"off": median([pair.off.step_s for pair in each]), "on": median([pair.on.step_s for pair in each])},
        "ratio": vars(bootstrap([pair.on.step_s / pair.off.step_s for pair in each])),
        "ratio_of_means": vars(bootstrap([pair.on.mean_s / pair.off.mean_s for pair in each])),
        "ratio_of_cpu": vars(bootstrap([pair.on.cpu_s / pair.off.cpu_s for pair in each])),
        "foreign_cores": add(turn.used for pair in each for turn in (pair.off, pair.on)).foreign_cores,
        "rounds": len(each),
    }


def _row(streams: int, result: Figures) -> list[str]:
    ratios = (result["ratio"], result["ratio_of_means"], result["ratio_of_cpu"])
    steps = result["step_s"]
    return [
        str(streams),
        *(milliseconds(steps[side], 2) for side in ("off", "on")),
        *(Interval(**ratio).shown(3) for ratio in ratios),
    ]
