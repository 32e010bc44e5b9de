"""A worker that joins a fleet: how much it finds in its cache, with and without the hottest prefixes brought there.

Simulated, with the production policy, counts and scheduler: three workers serve prompts that begin with system prompts
of a Zipf-like popularity, a fourth one joins. The measure: from `FROM_S` after it joins, for `FOR_S`, the share of its
prompt tokens that were found in its cache is at least `NEAR` of that of the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from benchmarks.harness.report import Figures, milliseconds, table
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Joining, names, simulate
from dynamo_local.sim.requests import Arrival, Served, percentile
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import MockerTiming

FROM_S, FOR_S, NEAR = 5.0, 10.0, 0.9
JOINS_AT_S = 60.0
WORKERS, _SEEDS, _RATES = 4, range(1, 4), (12.0, 40.0)
SETTINGS = MockerSettings(mocker_kv_blocks=4_096, mocker_max_num_seqs=64, mocker_max_num_batched_tokens=2_048)
_HEADERS = (
    "requests/s",
    "brought",
    "hits of the new",
    "of the others",
    "ratio",
    "requests",
    "TTFT p90 new",
    "others, ms",
)


@dataclass(frozen=True)
class Prefixes:
    """Prompts of `shared` tokens, of which `kinds` are asked for, each with `own` tokens behind it. `rate`: requests a
    second. The n-th prompt is asked for in proportion to 1 / n ** `steep`."""

    rate: float
    kinds: int = 40
    shared: int = 2_048
    own: int = 256
    output: int = 100
    steep: float = 1.0

    def arrivals(self, seed: int, seconds: float) -> list[Arrival]:
        draw, at, made = random.Random(seed), 0.0, list[Arrival]()
        weights = list(accumulate((kind + 1) ** -self.steep for kind in range(self.kinds)))
        size = SETTINGS.mocker_block_size
        while (at := at + draw.expovariate(self.rate)) < seconds:
            kind = draw.choices(range(self.kinds), cum_weights=weights)[0]
            keys = tuple((kind + 1) << 20 | index for index in range(self.shared // size))
            own, output = draw.randint(self.own // 2, self.own * 3 // 2), draw.randint(20, 2 * self.output)
            made.append(Arrival(len(made), at, self.shared + own, output, keys))
        return made


@dataclass(frozen=True)
class Joined:
    """Hits are shares of prompt tokens that were found in caches, without what requests pulled themselves. nan: there
    were no requests."""

    new: float
    others: float
    requests: int
    ttft_new_s: float
    ttft_others_s: float


def measured(quick: bool) -> Figures:
    """Simulate, print, and return the figures."""
    seeds = list(_SEEDS)[:1] if quick else list(_SEEDS)
    arms = {(rate, share): _joined(seeds, rate, share) for rate in _RATES for share in (0.0, 0.5)}
    rows = [_row(rate, share, found) for (rate, share), found in arms.items()]
    table(f"A worker joins three: {FROM_S:g} to {FROM_S + FOR_S:g} s after", _HEADERS, rows)
    worst = min(found.new / found.others for (_, share), found in arms.items() if share)
    print(f"hits of the new worker to those of the others: at least {worst:.2f}, aim {NEAR}")
    return {f"{rate:g} a second, {share:.0%} brought": asdict(found) for (rate, share), found in arms.items()}


def _joined(seeds: Iterable[int], rate: float, share: float) -> Joined:
    new, others = list[Served](), list[Served]()
    for seed in seeds:
        fleet = names(WORKERS)
        router = PolicyRouter(POLICIES["kv"](), fleet[:-1], SETTINGS, pulls=True)
        requests = Prefixes(rate).arrivals(seed, JOINS_AT_S + FROM_S + FOR_S)
        joining = Joining(JOINS_AT_S, share, router.join)
        result = simulate(requests, router, WORKERS, SETTINGS, MockerTiming(SETTINGS), joining=joining)
        for each in result.served:
            if each.at >= JOINS_AT_S + FROM_S:
                (new if each.worker == fleet[-1] else others).append(each)
    return Joined(_hits(new), _hits(others), len(new), _ttft_s(new), _ttft_s(others))


def _hits(served: Sequence[Served]) -> float:
    return (
        sum(each.cached for each in served) / sum(each.arrival.prompt_tokens for each in served) if served else math.nan
    )


def _ttft_s(served: Sequence[Served]) -> float:
    return percentile([each.ttft_s for each in served], 0.9)


def _row(rate: float, share: float, found: Joined) -> list[str]:
    return [
        f"{rate:g}",
        f"{share:.0%}",
        f"{found.new:.3f}",
        f"{found.others:.3f}",
        f"{found.new / found.others:.2f}",
        str(found.requests),
        milliseconds(found.ttft_new_s),
        milliseconds(found.ttft_others_s),
    ]
