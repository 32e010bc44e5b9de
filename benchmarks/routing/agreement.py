"""Whether simulated fleets tell what real processes do: the same requests to both.

Real are `dynamo serve` with frontend, router, NATS, four worker processes with mockers at a fifth of their speed, HTTP,
and the time that passes. The simulation has the same settings, at the same speed. Both run the default policy, with
pulls and rebalancing, on prompts that begin with shared ones (joining.py). Compared are the share of prompt tokens that
were found in caches or pulled, and the mean time to first token: aim, within `NEAR`.

What messages take, through HTTP, the frontend, the router and the bus, is measured in the same run: on single requests
to the idle server, before the load and after it, the median of their times to first token less the step that computes
them. The simulation is given that time, one half before a worker and the other behind it. Nothing is fitted to the
outcome.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.harness.generated import client_of
from benchmarks.harness.load import LETTERS
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import Server, ServerError, running
from benchmarks.harness.spread import median
from benchmarks.migration.rebalance import samples_of
from benchmarks.routing.joining import Prefixes
from benchmarks.routing.mockers import MAX_IN_FLIGHT, Prompts, start_mockers
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.load.client import Client
from dynamo_local.load.figures import Record
from dynamo_local.load.session import Generator
from dynamo_local.sim.fleet import AT_ONCE, Messages, names, simulate
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import MockerTiming

NEAR = 0.05
_SPEED, _SECONDS, _QUICK_SECONDS = 0.2, 300.0, 30.0
_WORKERS = 4
_SINGLE, _SINGLE_TOKENS = 15, 2_048
_RATE = 10.0
"""Requests a second at full speed: the workers are busy for about half of the time."""

_SETTINGS = MockerSettings(mocker_kv_blocks=4_096, mocker_max_model_len=4_096, mocker_speedup=_SPEED)


@dataclass(frozen=True)
class Side:
    """`reused`: share of prompt tokens found or pulled. Times in seconds."""

    requests: int
    reused: float
    ttft_mean_s: float
    itl_mean_s: float


async def measured(quick: bool) -> Figures:
    """Serve and simulate, print, and return the figures."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    made = Prefixes(_RATE, own=512).arrivals(1, seconds * _SPEED)
    arrivals = [replace(each, at=each.at / _SPEED) for each in made]
    real, beside_s = await _real(arrivals)
    at_once, simulated = _simulated(arrivals, AT_ONCE), _simulated(arrivals, Messages(beside_s / 2, beside_s / 2))
    sides = {"messages at once": at_once, "simulated": simulated, "processes": real}
    rows = [_row(name, side) for name, side in sides.items()]
    table(f"{len(arrivals)} requests, {seconds:g} s", ("", "reused", "TTFT mean, ms", "ITL mean, ms"), rows)
    print(f"messages: {milliseconds(beside_s)} ms, measured on single requests")
    reused, ttft, itl = (
        getattr(real, name) / getattr(simulated, name) for name in ("reused", "ttft_mean_s", "itl_mean_s")
    )
    print(f"processes to simulation: reused {reused:.3f}, TTFT {ttft:.3f}, ITL {itl:.3f}; aim: within {NEAR:.0%}")
    return {"messages_s": beside_s, **{name: asdict(side) for name, side in sides.items()}}


def _simulated(arrivals: Sequence[Arrival], messages: Messages) -> Side:
    router = PolicyRouter(POLICIES["kv"](), names(_WORKERS), _SETTINGS, pulls=True)
    timing = MockerTiming(_SETTINGS)
    result = simulate(arrivals, router, _WORKERS, _SETTINGS, timing, RebalancingLimits(), messages=messages)
    prompt = sum(each.arrival.prompt_tokens for each in result.served)
    return Side(
        len(result.served),
        sum(each.cached + each.pulled for each in result.served) / prompt,
        sum(each.ttft_s for each in result.served) / len(result.served),
        result.gaps.mean,
    )


async def _real(arrivals: Sequence[Arrival]) -> tuple[Side, float]:
    """What came of the requests, and the time of messages in seconds."""
    prompts = Prompts(arrivals, _SETTINGS.mocker_block_size)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_mockers(Path(scratch), _SETTINGS, _WORKERS, most_workers=_WORKERS, hot_prefix_share=0.0)
        async with running(server):
            await server.ready()
            progress("ready")
            async with client_of(server) as client:
                beside_s = [await _beside_step_s(client, f"before {number}") for number in range(_SINGLE)]
                before = await _used(server)
                generator = Generator(client, prompts, MAX_IN_FLIGHT)
                await generator.open_loop(prompts.planned())
                after = await _used(server)
                beside_s += [await _beside_step_s(client, f"after {number}") for number in range(_SINGLE)]
            prompt, cached = (now - then for now, then in zip(after, before, strict=True))
            return _side(generator.records, cached / prompt), median(beside_s)


async def _beside_step_s(client: Client, name: str) -> float:
    prompt = random.Random(name).choices(LETTERS, k=_SINGLE_TOKENS)
    completion = await client.complete(prompt, 1)
    if completion.ttft_s is None:
        raise ServerError(completion.failure)
    return completion.ttft_s - _SETTINGS.step_s(_SINGLE_TOKENS, 0)


async def _used(server: Server) -> tuple[float, float]:
    """Prompt tokens so far, and cached or pulled ones among them."""
    metrics = (await server.get("/metrics")).decode()
    prompt = sum(samples_of(metrics, "dynamo_usage_prompt_tokens_total").values())
    return prompt, sum(samples_of(metrics, "dynamo_usage_cached_tokens_total").values())


def _side(records: Sequence[Record], reused: float) -> Side:
    failed = [record.failure for record in records if record.error]
    if failed:
        raise ServerError(f"{len(failed)} requests failed, one with: {failed[0]}")
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [gap for record in records for gap in record.gaps_s]
    return Side(len(records), reused, sum(ttfts) / len(ttfts), sum(gaps) / len(gaps))


def _row(name: str, side: Side) -> list[str]:
    return [name, f"{side.reused:.4f}", milliseconds(side.ttft_mean_s), milliseconds(side.itl_mean_s)]
