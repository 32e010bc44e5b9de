"""Many endpoints on few devices under a random open load, on real processes with mockers: is every request answered,
how long does it wait, and how many swaps does that take, beside schedules that know all arrivals (benchmark `turns`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from benchmarks.endpoints.asleep import STEP_MS, Sleepers, sleeper, sleeping
from benchmarks.endpoints.turn_bounds import fewest_swaps, least_swaps
from benchmarks.endpoints.turn_world import Arrival, World
from benchmarks.endpoints.turns import open_load
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.spread import median, quantile
from dynamo_local.core.endpoints.turns import TURN_S, Limits, longest_wait_s
from dynamo_local.load.figures import Completion

_REQUEST_S = 1.0
"""Mean time of a request."""
_ALONE = 6
"""Requests one after another, each for another endpoint, which measure a swap without a queue."""
_MOST_TOKENS = 2000


@dataclass(frozen=True)
class RandomLoad:
    """Poisson arrivals. `rate`: per second; `duration_s`: until the last one."""

    rate: float
    duration_s: float
    seed: int


class RealTurns(msgspec.Struct, frozen=True):
    """What came of the load.

    `swaps`: starts of workers. `offline`: the fewest of the schedules tried that know all arrivals and let nobody wait
    longer; None: each has somebody wait longer. `least`: fewer swaps need a longer wait. `alone_s`: from a request to
    its first token if nobody else asks, the end of another endpoint's worker included. `bound_s`: on the wait.
    """

    requests: int
    answered: int
    swaps: int
    offline: int | None
    least: float
    alone_s: float
    wait_p50_s: float
    wait_p99_s: float
    wait_most_s: float
    bound_s: float
    late_s: float
    """The longest time by which a request was sent too late."""
    errors: dict[str, int]


async def measure(endpoints: int, devices: int, load: RandomLoad) -> Figures:
    """Measure, print, and return the figures."""
    names = [f"e{number}" for number in range(endpoints)]
    planned = open_load(names, load.rate, load.duration_s, _REQUEST_S, load.seed, skewed=False)
    async with sleeping([sleeper(name) for name in names], (f"--cpu-slots={devices}",)) as sleepers:
        alone_s = await _alone(sleepers, names[: devices + _ALONE], devices)
        progress(f"alone: {alone_s:.2f} s; {len(planned)} requests")
        sleepers.events()
        records = await _send(sleepers, planned)
        starts = sum(event.kind == "start" and event.what == "started" for event in sleepers.events())
    found = _judged(planned, records, starts, alone_s, World(names, devices, alone_s))
    _show(found, load)
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


async def _alone(sleepers: Sleepers, names: Sequence[str], devices: int) -> float:
    times = []
    for name in names:
        async with sleepers.client(name) as client:
            record = await client.complete("alone", 1)
        times.append(record.ttft_s or 0.0)
        await asyncio.sleep(1.0)
    return median(times[devices:])


async def _send(sleepers: Sleepers, planned: Sequence[Arrival]) -> list[Completion]:
    clients = {name: sleepers.client(name) for name in {one.endpoint for one in planned}}
    began = time.monotonic()
    done = 0

    async def one(arrival: Arrival) -> Completion:
        nonlocal done
        await asyncio.sleep(max(0.0, began + arrival.at - time.monotonic()))
        record = Completion(at_s=began + arrival.at, output_tokens=_tokens(arrival))
        request = clients[arrival.endpoint].request(b'"%d"' % hash(arrival.at), record.output_tokens)
        await clients[arrival.endpoint].send(request, record)
        done += 1
        if done % 50 == 0:
            progress(f"{done} answered after {time.monotonic() - began:.0f} s")
        return record

    try:
        return await asyncio.gather(*map(one, planned))
    finally:
        for client in clients.values():
            client.close()


def _tokens(arrival: Arrival) -> int:
    return min(_MOST_TOKENS, max(1, round(arrival.runs_s * 1e3 / STEP_MS)))


def _judged(
    planned: Sequence[Arrival], records: Sequence[Completion], swaps: int, alone_s: float, world: World
) -> RealTurns:
    whole = [one for one in records if one.is_completed and one.tokens == one.output_tokens]
    waits = [one.ttft_s for one in whole if one.ttft_s is not None]
    # As long as they really ran.
    arrivals = [
        replace(arrival, runs_s=(one.e2e_s or 0.0) - (one.ttft_s or 0.0))
        for arrival, one in zip(planned, records, strict=True)
    ]
    longest_s = max(one.runs_s for one in arrivals)
    limits = Limits()
    return RealTurns(
        len(records),
        len(whole),
        swaps,
        fewest_swaps(world, arrivals, max(waits), TURN_S),
        least_swaps(world, arrivals, max(waits)),
        alone_s,
        median(waits),
        quantile(waits, 0.99),
        max(waits),
        longest_wait_s(len(list(world.endpoints)) - 1, limits, longest_s, alone_s),
        max(one.lag_s or 0.0 for one in records),
        dict(Counter(one.failure or "too few tokens" for one in records if one not in whole)),
    )


def _show(found: RealTurns, load: RandomLoad) -> None:
    rows = [
        ["requests, answered", f"{found.requests}, {found.answered}"],
        ["swaps", str(found.swaps)],
        ["swaps of an offline schedule (ratio)", _ratio(found.swaps, found.offline)],
        ["lower bound of all schedules (ratio)", _ratio(found.swaps, found.least)],
        ["first token if nobody else asks, s", f"{found.alone_s:.2f}"],
        [
            "first token p50, p99, longest, s",
            f"{found.wait_p50_s:.2f}, {found.wait_p99_s:.1f}, {found.wait_most_s:.1f}",
        ],
        ["bound on the wait, s", f"{found.bound_s:.0f}"],
        ["sent too late by at most, s", f"{found.late_s:.2f}"],
    ]
    table(f"Turns, {load.rate:g} requests a second for {load.duration_s:g} s", ["", ""], rows)
    for error, number in found.errors.items():
        print(f"{number} times {error}")


def _ratio(swaps: int, others: float | None) -> str:
    return f"{others:.0f} ({swaps / others:.2f})" if others else "-"
