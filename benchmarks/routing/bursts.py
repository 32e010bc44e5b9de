"""Bursts of requests that begin alike: whether a prefix is followed into a queue while another worker is idle.

Three simulated workers, of which one has the prefix. Before, other requests have let the workers measure their engines,
unless `measured` is false. The measure: the median and the p99 of the time to first token of a burst's requests, over
all seeds, are at most `WORSE` times the better of those of the policies least-loaded and round-robin.

`served` sends two of these bursts, with what comes before, to servers with three mocker processes.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.generated import client_of
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import ServerError, running
from benchmarks.routing.arms import ARMS
from benchmarks.routing.mockers import MAX_IN_FLIGHT, Prompts, start_mockers
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.load.session import Generator
from dynamo_local.sim.fleet import names, simulate
from dynamo_local.sim.requests import Arrival, Served, percentile
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import MockerTiming

WORSE = 1.1
WORKERS = 3
PREFIX = 2_048
_REQUESTS_OF_A_SHAPE, _MOST_SEEDS = 320, 20
_WARM_UP, _WARM_UP_RATE = 60, 2.0
_SETTINGS = MockerSettings(mocker_kv_blocks=8_192)
_BASES = ("least-loaded", "round-robin")
_PULLING = "kv, pulling"
_HEADERS = ("burst", "arm", "TTFT p50", "p99, ms", "to the better", "", "not computed")


@dataclass(frozen=True)
class Burst:
    """`requests` at once, or within `within_s` seconds, of `prefixes` different prefixes and `own` tokens each, for
    workers of `places` requests. `slower`: factor by which one worker is slower. `running`: requests that the workers
    have already, and for longer than the burst's take."""

    name: str
    requests: int
    places: int = 4
    prefixes: int = 1
    own: int = 64
    within_s: float = 0.0
    slower: float = 1.0
    running: int = 0
    measured: bool = True

    @property
    def settings(self) -> MockerSettings:
        return replace(_SETTINGS, mocker_max_num_seqs=self.places)


BURSTS = (
    *(Burst(f"{number} at once", number) for number in (4, 16, 64, 256)),
    *(Burst(f"{number} at once, 64 places each", number, places=64) for number in (16, 64, 256)),
    Burst("64 at once, 64 places, 512 own tokens", 64, places=64, own=512),
    Burst("16 in 2 s", 16, within_s=2.0),
    Burst("64 in 8 s", 64, within_s=8.0),
    Burst("16, nothing measured", 16, measured=False),
    Burst("64, nothing measured", 64, measured=False),
    Burst("64 of two prefixes", 64, prefixes=2),
    Burst("64 of two prefixes, 64 places", 64, prefixes=2, places=64),
    Burst("16, one worker slow", 16, slower=3.0),
    Burst("64, one worker slow", 64, slower=3.0),
    Burst("64, one worker slow, 64 places", 64, slower=3.0, places=64),
    Burst("32, all full", 32, running=12),
)


def measured(quick: bool) -> Figures:
    """Simulate, print, and return the figures."""
    found: Figures = {}
    rows: list[list[str]] = []
    for burst in BURSTS[:2] if quick else BURSTS:
        arms = {arm: _served(burst, arm, 1 if quick else _MOST_SEEDS) for arm in (*_BASES, "kv", _PULLING)}
        median, p99 = (min(_ttft_s(arms[base], share) for base in _BASES) for share in (0.5, 0.99))
        found[burst.name] = {
            arm: {"p50_s": _ttft_s(served, 0.5), "p99_s": _ttft_s(served, 0.99), "found": _found(served)}
            for arm, served in arms.items()
        }
        rows += [_row(burst.name, arm, served, median, p99) for arm, served in arms.items()]
        progress(burst.name)
    table(f"Bursts, {WORKERS} workers", _HEADERS, rows)
    return found


def _served(burst: Burst, arm: str, seeds: int) -> list[Served]:
    """The requests of the burst, of all seeds."""
    served = list[Served]()
    settings = burst.settings
    for seed in range(max(min(seeds, _REQUESTS_OF_A_SHAPE // burst.requests), 3)):
        before, burst_of_seed = arrivals(burst, seed)
        router = PolicyRouter(ARMS["kv" if arm == _PULLING else arm](), names(WORKERS), settings, pulls=arm == _PULLING)
        timing = dict.fromkeys(names(WORKERS), MockerTiming(settings))
        timing[names(WORKERS)[seed % WORKERS]] = MockerTiming(replace(settings, mocker_speedup=1 / burst.slower))
        result = simulate([*before, *burst_of_seed], router, WORKERS, settings, timing)
        served += [each for each in result.served if each.arrival.number >= len(before)]
    return served


def arrivals(burst: Burst, seed: int) -> tuple[list[Arrival], list[Arrival]]:
    """What comes before, the prefixes alone among it, and the burst."""
    draw, at, before = random.Random(f"burst {burst.name} {seed}"), 0.0, list[Arrival]()
    for number in range(_WARM_UP if burst.measured else 0):
        at += draw.expovariate(_WARM_UP_RATE)
        before.append(Arrival(number, at, draw.randint(64, 1_500), draw.randint(50, 150)))
    at += 10.0
    blocks = PREFIX // _SETTINGS.mocker_block_size
    keys = [tuple(range(prefix << 20, (prefix << 20) + blocks)) for prefix in range(1, burst.prefixes + 1)]
    for prefix in keys:
        before.append(Arrival(len(before), at, PREFIX + burst.own, 20, prefix))
        at += 2.0
    for _ in range(burst.running):
        before.append(Arrival(len(before), at, 200, 400))
        at += 0.02
    at += 1.0
    return before, [
        Arrival(
            len(before) + number,
            at + (draw.uniform(0.0, burst.within_s) if burst.within_s else number * 1e-4),
            PREFIX + burst.own,
            draw.randint(50, 150),
            keys[number % burst.prefixes],
        )
        for number in range(burst.requests)
    ]


async def served(quick: bool) -> Figures:
    """The same by mocker processes, for the first bursts: serve, print, and return the figures."""
    found: Figures = {}
    for burst in (BURSTS[1],) if quick else (BURSTS[1], BURSTS[2]):
        waits = {arm: await _waits(burst, arm) for arm in (*_BASES, "kv")}
        rows = [
            [arm, *(milliseconds(percentile(each, share), 0) for share in (0.5, 0.99))] for arm, each in waits.items()
        ]
        table(f"{burst.name}, {WORKERS} processes", ("arm", "TTFT p50", "p99, ms"), rows)
        found[burst.name] = waits
    return found


async def _waits(burst: Burst, arm: str) -> list[float]:
    """Times to first token of a burst's requests, in seconds."""
    before, at_once = arrivals(burst, 1)
    prompts = Prompts([*before, *at_once], burst.settings.mocker_block_size)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_mockers(
            *(Path(scratch), burst.settings, WORKERS), most_workers=WORKERS, hot_prefix_share=0.0, policy=arm
        )
        async with running(server):
            await server.ready()
            async with client_of(server) as client:
                generator = Generator(client, prompts, MAX_IN_FLIGHT)
                await generator.open_loop(prompts.planned())
    progress(f"{burst.name}, {arm}")
    failed = [record.failure for record in generator.records if record.error]
    if failed:
        raise ServerError(f"{len(failed)} requests failed, one with: {failed[0]}")
    first_tokens = sorted((record.at_s, record.ttft_s or 0.0) for record in generator.records)
    return [ttft_s for _, ttft_s in first_tokens[len(before) :]]


def _ttft_s(served: list[Served], share: float) -> float:
    return percentile((each.ttft_s for each in served), share)


def _found(served: list[Served]) -> float:
    """Share of the prompts' tokens that was found in caches or pulled."""
    return sum(each.cached + each.pulled for each in served) / sum(each.arrival.prompt_tokens for each in served)


def _row(name: str, arm: str, served: list[Served], median: float, p99: float) -> list[str]:
    found = _ttft_s(served, 0.5), _ttft_s(served, 0.99)
    times = [milliseconds(each, 0) for each in found]
    return [name, arm, *times, f"{found[0] / median:.2f}", f"{found[1] / p99:.2f}", f"{_found(served):.2f}"]
