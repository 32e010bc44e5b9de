"""Workloads of simulated fleets: the seven shapes of inference-perf's catalogue, and llm-d's 73-capacity."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from dynamo_local.sim.requests import Arrival

Draw = Callable[[random.Random], float]

_SESSION = 1 << 24
"""Most blocks of a session."""


@dataclass(frozen=True)
class Shape:
    """Sessions of requests, each of which has the context of the one before with its output, and new tokens. Lengths
    in tokens, times in seconds. `first`: tokens of the first prompt beside the system prompt, which all share."""

    name: str
    system: int
    first: Draw
    output: Draw
    rate: float
    """Sessions a second."""
    requests: int
    """Number of requests, about."""
    turns: Draw = lambda draw: 1
    added: Draw = lambda draw: 0
    pause: Draw = lambda draw: 0
    longest: int = 300_000
    """Tokens of a context at which a session ends."""


def log_normal(mean: float, deviation: float, least: float, most: float) -> Draw:
    """Log-normal of that mean and deviation, cut off."""
    variance = math.log(1 + (deviation / mean) ** 2)
    middle = math.log(mean) - variance / 2
    return lambda draw: min(max(draw.lognormvariate(middle, math.sqrt(variance)), least), most)


def normal(mean: float, deviation: float, least: float, most: float) -> Draw:
    return lambda draw: min(max(draw.gauss(mean, deviation), least), most)


def exponential(mean: float, least: float, most: float) -> Draw:
    return lambda draw: min(max(draw.expovariate(1 / mean), least), most)


def uniform(least: float, most: float) -> Draw:
    return lambda draw: draw.uniform(least, most)


def bimodal(low: Draw, high: Draw, share_of_high: float) -> Draw:
    return lambda draw: (high if draw.random() < share_of_high else low)(draw)


# Lengths, turns and pauses: `workload-catalog/*/config.json` (kubernetes-sigs/inference-perf). Contexts end
# at 300,000 tokens and sessions at 40 requests, so that workers of 1,048,576 tokens can run some. The
# replayed agents have no distributions there: log-normal ones of the observed means. Rates are ours: below what workers
# can compute with their caches.
SHAPES = (
    Shape(
        "interactive chat",
        system=1_000,
        first=log_normal(3_000, 2_500, 500, 14_000),
        output=normal(300, 150, 10, 1_000),
        rate=4.0,
        requests=6_000,
        turns=log_normal(4, 2.5, 1, 15),
        added=log_normal(50, 40, 10, 1_000),
        pause=log_normal(45, 40, 5, 300),
    ),
    Shape(
        "code generation",
        system=3_000,
        first=log_normal(100_000, 80_000, 10_000, 250_000),
        output=log_normal(425, 825, 50, 10_000),
        rate=0.1,
        requests=2_000,
        turns=uniform(10, 40),
        added=log_normal(1_500, 1_200, 100, 10_000),
        pause=log_normal(15, 55, 1, 1_000),
    ),
    Shape(
        "deep research",
        system=2_000,
        first=exponential(20_000, 2_000, 100_000),
        output=bimodal(uniform(50, 150), uniform(2_000, 4_000), 0.07),
        rate=0.2,
        requests=3_000,
        turns=normal(15, 8.5, 2, 50),
        added=log_normal(3_000, 2_500, 500, 15_000),
        pause=normal(25, 12, 5, 60),
    ),
    Shape(
        "reasoning",
        system=250,
        first=log_normal(750, 800, 100, 5_000),
        output=exponential(8_000, 500, 32_000),
        rate=1.0,
        requests=1_000,
    ),
    Shape(
        "summarization",
        system=500,
        first=bimodal(uniform(1_000, 8_000), uniform(34_000, 80_000), 0.2),
        output=normal(500, 300, 50, 2_000),
        rate=8.0,
        requests=4_000,
    ),
    Shape(
        "synthetic data",
        system=2_000,
        first=log_normal(500, 1_200, 50, 15_000),
        output=uniform(500, 8_000),
        rate=2.0,
        requests=1_500,
    ),
    Shape(
        "agents",
        system=5_000,
        first=log_normal(12_000, 20_000, 1_000, 100_000),
        output=log_normal(660, 3_000, 10, 20_000),
        rate=0.25,
        requests=4_000,
        turns=log_normal(22, 23, 1, 100),
        added=log_normal(3_900, 8_000, 50, 50_000),
        pause=log_normal(13, 60, 0.1, 600),
    ),
)


def arrivals(shape: Shape, block_tokens: int, seed: int, scale: float = 1.0) -> list[Arrival]:
    """First requests of the sessions, Poisson arrivals at `scale` times the rate, each with those that follow it."""
    draw = random.Random(f"{shape.name} {seed}")
    numbers, found, at, made = count(), list[Arrival](), 0.0, 0
    for session in count(1):
        at += draw.expovariate(shape.rate * scale)
        turns = list(_session(shape, session, block_tokens, numbers, draw))
        made += len(turns)
        following: Arrival | None = None
        for turn in reversed(turns):
            following = replace(turn, then=following)
        assert following is not None
        found.append(replace(following, at=at))
        if made >= shape.requests:
            return found
    raise AssertionError


def _session(
    shape: Shape, session: int, block_tokens: int, numbers: Iterator[int], draw: random.Random
) -> Iterator[Arrival]:
    prompt = shape.system + max(int(shape.first(draw)), 1)
    for turn in range(max(int(shape.turns(draw)), 1)):
        output = max(int(shape.output(draw)), 1)
        if turn and prompt + output > shape.longest:
            return
        shared = shape.system // block_tokens
        blocks = range((prompt + output) // block_tokens)
        keys = tuple(index if index < shared else session * _SESSION + index for index in blocks)
        yield Arrival(next(numbers), shape.pause(draw), prompt, output, keys)
        prompt += output + max(int(shape.added(draw)), 1)


@dataclass(frozen=True)
class Groups:
    """llm-d's 73-capacity: groups of prompts that begin alike (kv-cache, benchmarking/73-capacity). Lengths in tokens,
    times in seconds. Its working set is 73 % of eight caches of 307,328 tokens."""

    groups: int = 150
    prompts: int = 5
    shared: int = 6_000
    own: int = 1_200
    output: int = 1_000
    warm_rate: float = 15.0
    warm_s: float = 50.0
    block_tokens: int = 120
    cache_blocks: int = 2_561

    def arrivals(self, rate: float, requests: int, seed: int) -> tuple[list[Arrival], int]:
        """Requests in order, and how many of them are for warming up: each prompt once."""
        draw = random.Random(f"groups {seed}")
        every = [(group, prompt) for group in range(self.groups) for prompt in range(self.prompts)]
        warm, at, made = int(self.warm_rate * self.warm_s), 0.0, list[Arrival]()
        order = list[tuple[int, int]]()
        for number in range(warm + requests):
            at += draw.expovariate(self.warm_rate if number < warm else rate)
            if not order:
                order = draw.sample(every, len(every))
            made.append(self._arrival(number, at, *order.pop()))
        return made, warm

    def group_of(self, arrival: Arrival) -> int:
        return arrival.keys[0] // _SESSION

    def _arrival(self, number: int, at: float, group: int, prompt: int) -> Arrival:
        shared, own = self.shared // self.block_tokens, self.own // self.block_tokens
        keys = [(group + 1) * _SESSION + index for index in range(shared)]
        keys += [(group + 1) * _SESSION + (prompt + 1) * 1_000 + index for index in range(own)]
        return Arrival(number, at, self.shared + self.own, self.output, tuple(keys))
