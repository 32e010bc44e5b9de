"""Urgent requests among others, in virtual time: after the experiment of Llumnix (OSDI'24, section 6) for priorities.

Workers with the KV cache of a 7B model on a GPU of 24 GB (13,616 tokens); prompts and answers from one distribution of
short lengths with a mean of 128 tokens and a long tail; 10 % of the requests are urgent; arrivals are a Gamma process
whose gaps have a coefficient of variation of 2 to 8. The measure: the mean time from arrival to the last token of the
urgent requests, against the same ones in a run in which all are alike, is at least `FASTER` times shorter, and that of
the others at most `SLOWER` times longer. How much faster urgent requests could be at most, a third run says, in which
they have the workers for themselves.

`dispatched` compares policies by the same requests, none of them urgent and none of them moved.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from benchmarks.harness.report import Figures, milliseconds, progress, table
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Result, names, simulate
from dynamo_local.sim.requests import Arrival, Served, percentile
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import MockerTiming

FASTER, SLOWER = 1.5, 1.05
WORKERS = 8, 16
VARIATIONS = (2.0, 4.0, 6.0, 8.0)
URGENT = 0.1
EACH = 4.0
"""Requests a second for each worker, at which bursts queue and the fleet catches up."""
_REQUESTS, _SEEDS = 6_000, range(1, 4)
_DISPATCHED_WORKERS, _DISPATCHED_REQUESTS = 4, 3_000
_LENGTHS = ((0.0, 12), (0.5, 38), (0.8, 113), (0.95, 413), (0.99, 1_464), (1.0, 6_000))
"""Shares of the requests, and the lengths in tokens that these do not exceed; in between the logarithm is linear."""
SETTINGS = MockerSettings(
    mocker_kv_blocks=851,
    mocker_block_size=16,
    mocker_max_num_seqs=256,
    mocker_max_num_batched_tokens=2_048,
    mocker_max_model_len=13_000,
    mocker_step_base_ms=20.0,
    mocker_prefill_us_per_token=200.0,
    mocker_decode_us_per_seq=300.0,
)
_POLICIES = ("kv", "freeness", "least-loaded", "round-robin")
_ARMS = "alike", "urgent first", "urgent alone"
_HEADERS = (
    "workers",
    "CV",
    "arm",
    "urgent: mean, s",
    "TTFT mean",
    "p99, ms",
    "others: mean, s",
    "TTFT p99, ms",
    "preempted",
    "moved",
)


@dataclass(frozen=True)
class Speeds:
    """Figures of the requests of all seeds, in seconds: from arrival to the last token, and to the first."""

    urgent_s: float
    urgent_ttft_s: float
    urgent_ttft_p99_s: float
    others_s: float
    """NaN, if there are no others. So is the next one."""
    others_ttft_p99_s: float
    preemptions: int
    moves: int


@dataclass(frozen=True)
class Dispatched:
    """Figures of the requests of all seeds: to the first token, and to the last, in seconds."""

    ttft_s: float
    ttft_p99_s: float
    mean_s: float
    preemptions: int


def measured(quick: bool) -> Figures:
    """Simulate, print, and return the figures."""
    found: Figures = {}
    for workers in WORKERS[:1] if quick else WORKERS:
        for variation in VARIATIONS[:1] if quick else VARIATIONS:
            arms = {arm: _arm(arm, variation, workers, quick) for arm in _ARMS}
            rows = [_row(workers, variation, arm, each) for arm, each in arms.items()]
            table(f"Priorities, {EACH * workers:g} requests/s", _HEADERS, rows)
            alike, first, alone = (arms[arm] for arm in _ARMS)
            faster, slower = alike.urgent_s / first.urgent_s, first.others_s / alike.others_s
            at_most = alike.urgent_s / alone.urgent_s
            print(
                f"{workers} workers, CV {variation:g}: urgent {faster:.2f} times faster, aim {FASTER}, "
                f"alone {at_most:.2f}; others {slower:.3f}, aim {SLOWER}"
            )
            ratios = {"faster": faster, "slower": slower, "at_most": at_most}
            found[f"{workers} workers, CV {variation:g}"] = ratios | {arm: asdict(it) for arm, it in arms.items()}
    return found


def _arm(arm: str, variation: float, workers: int, quick: bool) -> Speeds:
    served, moves = list[Served](), 0
    for seed in list(_SEEDS)[:1] if quick else _SEEDS:
        drawn = drawn_arrivals(variation, seed, 1_000 if quick else _REQUESTS, EACH * workers)
        sent = [each for each in drawn if each.priority < 0] if arm == "urgent alone" else drawn
        result = _run([replace(each, priority=0) for each in sent] if arm == "alike" else sent, workers)
        # The arms have the same requests, and the same of them are judged as urgent.
        served += [replace(each, arrival=drawn[each.arrival.number]) for each in result.served]
        moves += len(result.moves)
        progress(f"{arm}, {workers} workers, CV {variation:g}, seed {seed}")
    return _speeds(served, moves)


def _run(arrivals: Sequence[Arrival], workers: int) -> Result:
    router = PolicyRouter(POLICIES["kv"](), names(workers), SETTINGS, pulls=True)
    return simulate(arrivals, router, workers, SETTINGS, MockerTiming(SETTINGS), RebalancingLimits())


def dispatched(quick: bool) -> Figures:
    """The same requests, none of them urgent and none moved, by four policies: print, and return the figures."""
    found: Figures = {}
    for variation in VARIATIONS[:1] if quick else VARIATIONS:
        rows = {name: _dispatched(name, variation, quick) for name in _POLICIES}
        told = [[f"{variation:g}", name, *_row_of(each)] for name, each in rows.items()]
        headers = "CV", "policy", "TTFT mean", "p99, ms", "mean, s", "preempted"
        table(f"Dispatch, {EACH * _DISPATCHED_WORKERS:g} requests/s", headers, told)
        found[f"{variation:g}"] = {name: asdict(each) for name, each in rows.items()}
    return found


def _dispatched(name: str, variation: float, quick: bool) -> Dispatched:
    served = list[Served]()
    for seed in list(_SEEDS)[:1] if quick else _SEEDS:
        rate, workers = EACH * _DISPATCHED_WORKERS, _DISPATCHED_WORKERS
        drawn = drawn_arrivals(variation, seed, 1_000 if quick else _DISPATCHED_REQUESTS, rate)
        router = PolicyRouter(POLICIES[name](), names(workers), SETTINGS, pulls=False)
        alike = [replace(each, priority=0) for each in drawn]
        served += simulate(alike, router, workers, SETTINGS, MockerTiming(SETTINGS)).served
        progress(f"{name}, CV {variation:g}, seed {seed}")
    return Dispatched(
        ttft_s=fmean(each.ttft_s for each in served),
        ttft_p99_s=percentile([each.ttft_s for each in served], 0.99),
        mean_s=fmean(each.ended_at - each.at for each in served),
        preemptions=sum(each.preempted for each in served),
    )


def _row_of(each: Dispatched) -> list[str]:
    waits = milliseconds(each.ttft_s, 0), milliseconds(each.ttft_p99_s, 0)
    return [*waits, f"{each.mean_s:.2f}", str(each.preemptions)]


def _speeds(served: Sequence[Served], moves: int) -> Speeds:
    urgent = [each for each in served if each.arrival.priority < 0]
    others = [each for each in served if each.arrival.priority >= 0]
    return Speeds(
        urgent_s=fmean(each.ended_at - each.at for each in urgent),
        urgent_ttft_s=fmean(each.ttft_s for each in urgent),
        urgent_ttft_p99_s=percentile([each.ttft_s for each in urgent], 0.99),
        others_s=fmean(each.ended_at - each.at for each in others) if others else math.nan,
        others_ttft_p99_s=percentile([each.ttft_s for each in others], 0.99) if others else math.nan,
        preemptions=sum(each.preempted for each in served),
        moves=moves,
    )


def drawn_arrivals(variation: float, seed: int, requests: int, rate: float) -> list[Arrival]:
    """Requests, `rate` a second, whose gaps have that coefficient of variation, a tenth of them urgent."""
    draw, at, arrivals = random.Random(f"priorities {variation} {seed}"), 0.0, []
    shape = variation**-2
    for number in range(requests):
        at += draw.gammavariate(shape, 1 / (rate * shape))
        priority = -1 if draw.random() < URGENT else 0
        arrivals.append(Arrival(number, at, _length(draw), _length(draw), priority=priority))
    return arrivals


def _length(draw: random.Random) -> int:
    share = draw.random()
    index = max(bisect_left(_LENGTHS, (share, math.inf)), 1)
    (low, shortest), (high, longest) = _LENGTHS[index - 1 : index + 1]
    return round(math.exp(math.log(shortest) + math.log(longest / shortest) * (share - low) / (high - low)))


def _row(workers: int, variation: float, arm: str, each: Speeds) -> list[str]:
    return [
        str(workers),
        f"{variation:g}",
        arm,
        f"{each.urgent_s:.2f}",
        milliseconds(each.urgent_ttft_s, 0),
        milliseconds(each.urgent_ttft_p99_s, 0),
        f"{each.others_s:.2f}",
        milliseconds(each.others_ttft_p99_s, 0),
        str(each.preemptions),
        str(each.moves),
    ]
