"""What the KV connector costs a decode step of an engine that neither pulls nor is pulled from.

Three engines take turns: two without the connector, of which one is the control, and one with it. So it is part of the
result how much two processes of the same kind differ, and what differs less cannot be told from nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.accounting import CLIENT, Usage, add, usage
from benchmarks.harness.calm import Patience
from benchmarks.harness.engines import BenchEngine
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.spread import Interval, bootstrap, median

_PROMPT_TOKENS = 40
_TOKENS = 4000
"""Of all streams of a turn: it takes a second or so."""
_MOST_TOKENS, _LEAST_TOKENS = 300, 60


@dataclass(frozen=True)
class Turn:
    """An engine decoding streams that march in step."""

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
class Round:
    """Neighbouring turns with the same requests."""

    off: Turn
    control: Turn
    on: Turn


@dataclass(frozen=True)
class Engines:
    """Those that take turns, on the same core."""

    off: BenchEngine
    control: BenchEngine
    on: BenchEngine

    @property
    def all(self) -> tuple[BenchEngine, ...]:
        return (self.off, self.control, self.on)


async def rounds_of(
    engines: Engines, streams: Sequence[int], rounds: int, patience: Patience
) -> dict[int, list[Round]]:
    """Whoever has not its turn is stopped."""
    for engine in engines.all:
        engine.pause()
    for engine in engines.all:
        await _turn(engine, max(streams), -1)
    found: dict[int, list[Round]] = {count: [] for count in streams}
    orders = itertools.cycle(itertools.permutations(engines.all))
    for number in range(rounds):
        # Another one each time: whatever drifts favours nobody.
        order = next(orders)
        for count in streams:
            await patience.wait(process for engine in engines.all for process in engine.processes)
            turns = {engine.name: await _turn(engine, count, number) for engine in order}
            this = Round(*(turns[engine.name] for engine in engines.all))
            found[count].append(this)
            shown = " / ".join(milliseconds(turn.step_s, 3) for turn in (this.off, this.control, this.on))
            progress(f"round {number + 1}, {count} streams: a step takes {shown} ms without / without / with it")
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


_HEADERS = (
    "streams",
    "step ms off",
    "on",
    "on / off [95 %]",
    "control / off",
    "of means: on / off",
    "control / off",
    "CPU of a step: on / off",
    "control / off",
)
_MEASURES: Mapping[str, Callable[[Turn], float]] = {
    "step": lambda turn: turn.step_s,
    "mean": lambda turn: turn.mean_s,
    "cpu": lambda turn: turn.cpu_s,
}


def report(found: Mapping[int, Sequence[Round]]) -> Figures:
    results = {streams: _compare(each) for streams, each in found.items()}
    table("A decode step without and with the connector", _HEADERS, [_row(n, each) for n, each in results.items()])
    return {str(streams): result for streams, result in results.items()}


def _compare(each: Sequence[Round]) -> Figures:
    ratios = {
        name: {
            "on": vars(bootstrap([of(one.on) / of(one.off) for one in each])),
            "control": vars(bootstrap([of(one.control) / of(one.off) for one in each])),
        }
        for name, of in _MEASURES.items()
    }
    return {
        "step_s": {"off": median([one.off.step_s for one in each]), "on": median([one.on.step_s for one in each])},
        "ratios": ratios,
        "foreign_cores": add(turn.used for one in each for turn in (one.off, one.control, one.on)).foreign_cores,
        "rounds": len(each),
    }


def _row(streams: int, result: Figures) -> list[str]:
    steps = result["step_s"]
    ratios = [ratio for measure in result["ratios"].values() for ratio in (measure["on"], measure["control"])]
    return [
        str(streams),
        *(milliseconds(steps[side], 2) for side in ("off", "on")),
        *(Interval(**ratio).shown(3) for ratio in ratios),
    ]
