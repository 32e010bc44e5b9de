"""Fleets in virtual time: the production policies, index and ledger, and the mocker's scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.routing.arms import ARMS, Partitioned
from benchmarks.routing.shapes import SHAPES, Groups, arrivals
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Router, names, simulate
from dynamo_local.sim.requests import BLOCK_TOKENS, Arrival, figures, mooncake
from dynamo_local.sim.requests import Figures as FleetFigures
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import DynamoTiming

WORKERS = 8
_PULLING = "kv, pulling"
_PARTITIONED = "partitioned by hand"
_POOLED = "one worker with all blocks"
_US_PER_TOKEN = 5
"""Time of a transfer: 4 MiB for each 32 tokens at 25 GiB/s."""

_SETTINGS = MockerSettings(mocker_max_num_seqs=256, mocker_max_num_batched_tokens=8192, mocker_max_model_len=10**7)
_HEADERS = ("arm", "reused", "pulled", "TTFT mean", "p90", "p99, ms", "ITL mean", "p99, ms", "tok/s", "preempted")


def replay(trace: Path, speeds: Sequence[float], most: int | None) -> Figures:
    """Mooncake's conversation trace at multiples of its speed, 8 workers with 2,048 blocks of 512 tokens."""
    found: Figures = {}
    for speed in speeds:
        requests = mooncake(trace, speed, most)
        rows = {name: _served(requests, name, 2_048, BLOCK_TOKENS) for name in (*_arms(), _PULLING)}
        rows[_POOLED] = _served(requests, "kv", WORKERS * 2_048, BLOCK_TOKENS, workers=1)
        found[f"x{speed:g}"] = _told(f"Mooncake's conversations, {speed:g} times as fast", rows)
    return found


def groups(rates: Sequence[float], requests: int) -> Figures:
    """llm-d's 73-capacity: 150 groups of prompts that begin alike, for caches that do not have room for all."""
    found: Figures = {}
    workload = Groups()
    for rate in rates:
        made, warm = workload.arrivals(rate, requests, seed=1)
        arms = (*_arms(), _PULLING, _PARTITIONED)
        rows = {
            name: _served(made, name, workload.cache_blocks, workload.block_tokens, warm=warm, groups=workload)
            for name in arms
        }
        found[f"{rate:g}"] = _told(f"73-capacity, {rate:g} requests a second", rows)
    return found


def shapes(quick: bool) -> Figures:
    """Seven shapes of load, for caches of a million tokens."""
    found: Figures = {}
    for shape in SHAPES[:1] if quick else SHAPES:
        requests = arrivals(shape, 128, seed=1, scale=0.2 if quick else 1.0)
        found[shape.name] = _told(shape.name, {name: _served(requests, name, 8_192, 128) for name in _arms()})
    return found


def _arms() -> Iterator[str]:
    return (name for name in ARMS if name != "random")


def _served(
    requests: Sequence[Arrival],
    arm: str,
    blocks: int,
    block_tokens: int,
    *,
    workers: int = WORKERS,
    warm: int = 0,
    groups: Groups | None = None,
) -> FleetFigures:
    """Figures of all requests but the first `warm` ones."""
    settings = replace(
        _SETTINGS,
        mocker_kv_blocks=blocks,
        mocker_block_size=block_tokens,
        mocker_transfer_us_per_block=_US_PER_TOKEN * block_tokens,
    )
    fleet = names(workers)
    router: Router
    if arm == _PARTITIONED and groups is not None:
        router = Partitioned(fleet, groups.group_of)
    else:
        policy = ARMS["kv" if arm == _PULLING else arm]()
        router = PolicyRouter(policy, fleet, settings, pulls=arm == _PULLING)
    result = simulate(requests, router, workers, settings, DynamoTiming(blocks * block_tokens))
    progress(arm)
    return figures([each for each in result.served if each.arrival.number >= warm], result.gaps)


def _told(title: str, rows: dict[str, FleetFigures]) -> Figures:
    table(title, _HEADERS, [_row(name, figures) for name, figures in rows.items()])
    return {name: asdict(figures) for name, figures in rows.items()}


def _row(name: str, found: FleetFigures) -> list[str]:
    waits = [milliseconds(each, 0) for each in (found.ttft_mean_s, found.ttft_p90_s, found.ttft_p99_s)]
    gaps = [milliseconds(each) for each in (found.itl_mean_s, found.itl_p99_s)]
    rate = f"{found.output_tokens_per_s:,.0f}"
    return [name, f"{found.reused:.4f}", f"{found.pulled:.4f}", *waits, *gaps, rate, str(found.preemptions)]
