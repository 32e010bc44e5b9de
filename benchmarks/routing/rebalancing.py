"""Whether rebalancing ever harms: five shapes of load on simulated fleets, with it and without.

The measure: over the requests of all seeds of each shape, the p99 of the time to first token and of the inter-token
latency are at most `WORSE` times those without it, and the goodput is at least one `WORSE`th. Goodput counts requests
whose first token came within `TTFT_S` and whose mean inter-token latency is at most `ITL_S`. Half of the seeds are of
earlier trials, half are fresh, and each half is judged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.harness.report import Figures, milliseconds, progress, table
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Result, names, simulate
from dynamo_local.sim.requests import Arrival, Gaps, Served, percentile
from dynamo_local.sim.routers import Placement, PolicyRouter
from dynamo_local.sim.worker import MockerTiming

WORSE = 1.05
TTFT_S, ITL_S = 1.0, 0.05
_WORKERS = 4
_SEEDS = {"known": range(11, 19), "fresh": range(101, 109)}
"""Seeds of earlier trials, and others."""
_REQUESTS = 250
_MEAN_ANSWER, _LONGEST_ANSWER = 150, 1_500
_SETTINGS = MockerSettings(mocker_kv_blocks=160, mocker_block_size=16, mocker_max_num_seqs=64)
_HEADERS = ("shape", "arm", "TTFT p50", "p99, ms", "ITL p99, ms", "goodput/s", "preempted", "moved", "to without")


@dataclass(frozen=True)
class LoadShape:
    """Requests a second for four workers; of ten, `sticky` go to the first worker whatever its load."""

    name: str
    rate: float
    sticky: int = 0


LOAD_SHAPES = (
    LoadShape("balanced", 8),
    LoadShape("near full", 15),
    LoadShape("beyond full", 24),
    LoadShape("skewed", 8, sticky=4),
    LoadShape("thrashing", 10, sticky=6),
)


@dataclass(frozen=True)
class Pooled:
    """Figures of the requests of all seeds. Times in seconds, `goodput` in requests a second."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    goodput: float
    preemptions: int
    moves: int

    def worst_ratio_to(self, without: Pooled) -> float:
        """The largest of the ratios that are to be at most `WORSE`."""
        ratios = (self.ttft_p99_s / without.ttft_p99_s, self.itl_p99_s / without.itl_p99_s)
        return max(*ratios, without.goodput / self.goodput if self.goodput else float("inf"))


@dataclass
class _Pool:
    served: list[Served] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    moves: Counter[str] = field(default_factory=Counter)
    span_s: float = 0.0

    def add(self, result: Result) -> None:
        self.served += result.served
        self.gaps.counts.update(result.gaps.counts)
        self.moves.update(result.moves)
        self.span_s += max(each.ended_at for each in result.served) - min(each.at for each in result.served)

    @property
    def figures(self) -> Pooled:
        ttfts = [each.ttft_s for each in self.served]
        return Pooled(
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            itl_p99_s=self.gaps.percentiles([0.99])[0],
            goodput=sum(is_good(each) for each in self.served) / self.span_s,
            preemptions=sum(each.preempted for each in self.served),
            moves=self.moves.total(),
        )


class _StickyRouter(PolicyRouter):
    """Sends a share of the requests to the first worker, as sessions that stick do."""

    sticky = 0

    def place(self, arrival: Arrival, now: float) -> Placement:
        if arrival.number % 10 < self.sticky:
            return self.place_at(arrival, names(1)[0], now)
        return super().place(arrival, now)


def judged(quick: bool) -> Figures:
    """Simulate all shapes, print, and return the figures."""
    halves = {half: _half(half, seeds[:1] if quick else seeds) for half, seeds in _SEEDS.items()}
    worst = max(arms["on"].worst_ratio_to(arms["off"]) for found in halves.values() for arms in found.values())
    print(f"worst ratio: {worst:.3f}; aim: at most {WORSE}", flush=True)
    return {
        "worst_ratio": worst,
        **{
            half: {name: {arm: asdict(each) for arm, each in arms.items()} for name, arms in found.items()}
            for half, found in halves.items()
        },
    }


def _half(title: str, seeds: Sequence[int]) -> Mapping[str, Mapping[str, Pooled]]:
    found = {shape.name: _both(shape, seeds) for shape in LOAD_SHAPES}
    rows = [row for name, arms in found.items() for row in _rows(name, arms)]
    table(f"Rebalancing: harm and gain, {title} seeds", _HEADERS, rows)
    return found


def is_good(served: Served) -> bool:
    """Whether a request that has ended counts for goodput."""
    between = (served.ended_at - served.first_token_at) / max(served.drawn - 1, 1)
    return served.ttft_s <= TTFT_S and between <= ITL_S


def _both(shape: LoadShape, seeds: Iterable[int]) -> Mapping[str, Pooled]:
    pools = {"off": _Pool(), "on": _Pool()}
    for seed in seeds:
        arrivals = drawn_arrivals(shape.rate, seed)
        pools["off"].add(_run(shape, arrivals, None))
        pools["on"].add(_run(shape, arrivals, RebalancingLimits()))
        progress(f"{shape.name}, seed {seed}")
    return {arm: pool.figures for arm, pool in pools.items()}


def _run(shape: LoadShape, arrivals: Sequence[Arrival], limits: RebalancingLimits | None) -> Result:
    router = _StickyRouter(POLICIES["kv"](), names(_WORKERS), _SETTINGS, pulls=True)
    router.sticky = shape.sticky
    return simulate(arrivals, router, _WORKERS, _SETTINGS, MockerTiming(_SETTINGS), limits)


def drawn_arrivals(rate: float, seed: int) -> list[Arrival]:
    """Requests at random times, prompts of 100 to 500 tokens, answers of very different lengths."""
    draw, at, arrivals = random.Random(seed), 0.0, []
    for number in range(_REQUESTS):
        at += draw.expovariate(rate)
        prompt, answer = draw.randint(100, 500), int(draw.expovariate(1 / _MEAN_ANSWER))
        arrivals.append(Arrival(number, at, prompt, min(max(answer, 1), _LONGEST_ANSWER)))
    return arrivals


def _rows(name: str, arms: Mapping[str, Pooled]) -> list[list[str]]:
    return [
        [
            name,
            arm,
            milliseconds(each.ttft_p50_s, 0),
            milliseconds(each.ttft_p99_s, 0),
            milliseconds(each.itl_p99_s),
            f"{each.goodput:.2f}",
            str(each.preemptions),
            str(each.moves),
            "" if arm == "off" else f"{each.worst_ratio_to(arms['off']):.3f}",
        ]
        for arm, each in arms.items()
    ]
