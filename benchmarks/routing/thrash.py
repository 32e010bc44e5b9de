"""The thrash spiral: sessions that stick to one worker keep it preempting and computing anew while others idle.

Four simulated workers. Until `FREE_AT_S` all sessions are sent to the first one, as by a proxy that knows no other:
that worker has no room for them any more. From then on the router places their turns by its default policy, and
requests migrate, or do not. The measure: within `WITHIN_S` the share of prompt tokens that is found in caches or pulled
is at `SHARE` of the best of any window of `WINDOW_S`; and the p99 of the inter-token latency of requests that the first
worker runs is at most `UNEVEN` times that of the others'.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness.report import Figures, milliseconds, table
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Result, names, simulate
from dynamo_local.sim.requests import Arrival, Served, percentile
from dynamo_local.sim.routers import Placement, PolicyRouter
from dynamo_local.sim.worker import MockerTiming

WITHIN_S, SHARE, UNEVEN, WINDOW_S = 10.0, 0.9, 1.3, 5.0
FREE_AT_S = 25.0
_WORKERS, _SEEDS = 4, range(1, 6)
_SETTINGS = MockerSettings(mocker_kv_blocks=768, mocker_block_size=16, mocker_max_num_seqs=64)
_SESSIONS, _TURNS, _PAUSE_S = 14, 24, 1.0
_HEADERS = ("migration", "seed", "hits before", "best", "after, s", "ITL p99 hot", "others, ms", "preempted", "moved")
_ARMS = {"never": None, "migrating": RebalancingLimits()}


@dataclass(frozen=True)
class Recovery:
    """What became of one run. `before`, `best`: shares of prompt tokens found or pulled, in the last window before the
    router was free, and in the best of all. `after_s`: from then until `SHARE` of the best; infinite: never.
    `itl_hot_s`, `itl_others_s`: p99 of requests' mean inter-token latency, by worker at which they began."""

    before: float
    best: float
    after_s: float
    itl_hot_s: float
    itl_others_s: float
    preempted: int
    moves: int


class _SticksFirst(PolicyRouter):
    def place(self, arrival: Arrival, now: float) -> Placement:
        return self.place_at(arrival, names(1)[0], now) if now < FREE_AT_S else super().place(arrival, now)


def measured(quick: bool) -> Figures:
    """Simulate, print, and return the figures."""
    seeds = list(_SEEDS)[:1] if quick else list(_SEEDS)
    found = {arm: [_recovery(_run(seed, limits)) for seed in seeds] for arm, limits in _ARMS.items()}
    rows = [_row(arm, seed, each) for arm, runs in found.items() for seed, each in zip(seeds, runs, strict=True)]
    table("The thrash spiral", _HEADERS, rows)
    late = max(each.after_s for each in found["migrating"])
    uneven = max(each.itl_hot_s / each.itl_others_s for each in found["migrating"])
    print(f"with migrations: back after {late:g} s at most, aim {WITHIN_S:g}; uneven by {uneven:.2f}, aim {UNEVEN}")
    return {arm: [asdict(each) for each in runs] for arm, runs in found.items()}


def _run(seed: int, limits: RebalancingLimits | None) -> Result:
    router = _SticksFirst(POLICIES["kv"](), names(_WORKERS), _SETTINGS, pulls=True)
    return simulate(sessions(seed), router, _WORKERS, _SETTINGS, MockerTiming(_SETTINGS), limits)


def sessions(seed: int) -> list[Arrival]:
    """Sessions that begin in the first seconds, each turn with the former context and some tokens more."""
    draw = random.Random(seed)
    return [_session(draw, number) for number in range(_SESSIONS)]


def _session(draw: random.Random, number: int) -> Arrival:
    lengths, context = [], 0
    for _ in range(_TURNS):
        prompt = context + draw.randint(20, 50)
        answer = draw.randint(50, 120)
        lengths.append((prompt, answer))
        context = prompt + answer
    keys = tuple(number << 20 | index for index in range(context // _SETTINGS.mocker_block_size + 1))
    found: Arrival | None = None
    for turn in reversed(range(_TURNS)):
        prompt, answer = lengths[turn]
        at = draw.uniform(0.0, 5.0) if turn == 0 else draw.expovariate(1 / _PAUSE_S)
        found = Arrival(number * _TURNS + turn, at, prompt, answer, keys, then=found)
    assert found is not None
    return found


def _recovery(result: Result) -> Recovery:
    later = [each for each in result.served if each.arrival.number % _TURNS]
    shares = {start: _share(_within(later, start)) for start in range(math.ceil(max(each.at for each in later)))}
    known = {start: share for start, share in shares.items() if share is not None}
    best = max(known.values())
    back = [start for start, share in sorted(known.items()) if start >= FREE_AT_S and share >= SHARE * best]
    free = [each for each in result.served if each.at >= FREE_AT_S and each.drawn > 1]
    hot = [_itl_s(each) for each in free if each.worker == names(1)[0]]
    others = [_itl_s(each) for each in free if each.worker != names(1)[0]]
    return Recovery(
        before=known.get(int(FREE_AT_S - WINDOW_S), math.nan),
        best=best,
        after_s=back[0] - FREE_AT_S if back else math.inf,
        itl_hot_s=percentile(hot, 0.99),
        itl_others_s=percentile(others, 0.99),
        preempted=sum(each.preempted for each in free),
        moves=len(result.moves),
    )


def _within(served: Sequence[Served], start: float) -> list[Served]:
    return [each for each in served if start <= each.at < start + WINDOW_S]


def _share(served: Sequence[Served]) -> float | None:
    prompt = sum(each.arrival.prompt_tokens for each in served)
    return sum(each.cached + each.pulled for each in served) / prompt if prompt else None


def _itl_s(served: Served) -> float:
    return (served.ended_at - served.first_token_at) / (served.drawn - 1)


def _row(arm: str, seed: int, each: Recovery) -> list[str]:
    return [
        arm,
        str(seed),
        f"{each.before:.2f}",
        f"{each.best:.2f}",
        f"{each.after_s:.0f}",
        milliseconds(each.itl_hot_s),
        milliseconds(each.itl_others_s),
        str(each.preempted),
        str(each.moves),
    ]
