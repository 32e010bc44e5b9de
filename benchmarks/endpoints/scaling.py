"""A step of load on an endpoint, from one worker's worth to that of all its workers: how long until it is served well.

Real are `dynamo serve -f`, its frontend, router, planner and controller, and every worker process; the engines are
mockers that run `PER_WORKER` requests at once and let the others wait. The load is a closed loop, so that what waits
does not grow without end while workers are missing. Policies take turns.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.endpoints.mockers import all_ready, mocker
from benchmarks.harness.generated import client_of, generator_of
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, Server, running, start_endpoints
from benchmarks.harness.spread import median, quantile
from dynamo_local.load.figures import Record
from dynamo_local.load.session import Generator
from dynamo_local.load.workload import Lengthwise, Uniform, endless
from state.paths import StatePaths

POLICIES = ("concurrency", "load")
NAME = "chat"
PER_WORKER = 8
_SLOTS = 16
_BEFORE_S = 10.0
_AFTER_S = 30.0
"""Time of the load after the last worker that policy `load` could have added, or concurrency has had to start."""
_PROMPT, _OUTPUT = 64, 100
_WINDOW_S = 5.0
_SHARE = 0.95

_ARGS: Mapping[str, Any] = {
    "mocker-step-base-ms": 20.0,
    "mocker-max-num-seqs": PER_WORKER,
    "mocker-start-s": 1.3,
}
"""With what a forked process takes, a worker is ready after 1.8 s, as the benchmark `startup` found."""


class Targets(msgspec.Struct, frozen=True):
    """What an answer has to keep, in seconds."""

    ttft_s: float = 1.0
    itl_s: float = 0.05

    def kept_by(self, answer: Answered) -> bool:
        return answer.ttft_s is not None and answer.ttft_s <= self.ttft_s and (answer.itl_s or 0.0) <= self.itl_s


class Answered(msgspec.Struct, frozen=True):
    """A request, sent `at_s` after the step. None: no token came."""

    at_s: float
    ttft_s: float | None
    itl_s: float | None


class Outing(msgspec.Struct, frozen=True):
    """A run of a policy. `orders`: (seconds after the step, workers). `served_s`: see `served_after`."""

    policy: str
    round: int
    answers: tuple[Answered, ...]
    orders: tuple[tuple[float, int], ...]
    served_s: float | None


def served_after(answers: Sequence[Answered], targets: Targets, seconds: float) -> float | None:
    """Seconds after the step from which on `_SHARE` of the requests sent in each `_WINDOW_S` kept the targets, until
    the load's end after `seconds`; None if they did not in the last one. Pure."""
    served: float | None = None
    for number in range(int(seconds / _WINDOW_S)):
        begin = number * _WINDOW_S
        sent = [answer for answer in answers if begin <= answer.at_s < begin + _WINDOW_S]
        kept = sum(map(targets.kept_by, sent))
        if not sent or kept < _SHARE * len(sent):
            served = None
        elif served is None:
            served = begin
    return served


async def measure(rounds: int, workers: int, adjustment_s: float) -> Figures:
    """Measure, print, and return the figures."""
    targets, outings = Targets(), []
    for number in range(rounds):
        # ABBA: whatever drifts favours no policy.
        for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
            outings.append(await _outing(policy, number, workers, adjustment_s, targets))
            served = outings[-1].served_s
            progress(f"{policy}: {'not served' if served is None else f'served after {served:.0f} s'}")
    _show(outings, targets, workers, adjustment_s)
    return {
        "workers": workers,
        "adjustment_s": adjustment_s,
        "targets": msgspec.to_builtins(targets),
        "outings": [msgspec.to_builtins(outing) for outing in outings],
    }


async def _outing(policy: str, number: int, workers: int, adjustment_s: float, targets: Targets) -> Outing:
    # As long for both, or a slow one would not be seen to be slow.
    seconds = workers * adjustment_s + _AFTER_S
    spec = mocker(NAME, _ARGS, policy=policy, min_workers=1, max_workers=workers, requests_per_worker=PER_WORKER)
    options = (f"--cpu-slots={_SLOTS}", f"--Planner.adjustment-interval={adjustment_s:g}")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [spec], options)
        async with running(server):
            await all_ready(server, [spec])
            server.model = NAME
            step_at, records = await _load(server, number, workers, seconds)
            orders = _orders(server, step_at)
    answers = tuple(_answered(record, _BEFORE_S) for record in records)
    return Outing(policy, number, answers, orders, served_after(answers, targets, seconds))


async def _load(server: Server, seed: int, workers: int, seconds: float) -> tuple[float, list[Record]]:
    """Sends streams for a single worker all the time, and those of the others from the step on. Returns when the step
    was (CLOCK_MONOTONIC, s), and all requests, whose times count from the beginning of the first load."""
    step_at = time.monotonic() + _BEFORE_S
    # A little below full: requests of a full fleet wait for each other.
    streams = PER_WORKER - 1
    async with client_of(server) as client:
        first, more = generator_of(client, seed), generator_of(client, seed + 1000)

        async def after_the_step() -> None:
            await asyncio.sleep(_BEFORE_S)
            await _ask(more, streams * (workers - 1), seconds, seed + 1000)

        await asyncio.gather(_ask(first, streams, _BEFORE_S + seconds, seed), after_the_step())
    for record in more.records:
        _shift(record, _BEFORE_S)
    return step_at, [*first.records, *more.records]


async def _ask(generator: Generator, streams: int, seconds: float, seed: int) -> None:
    shape = Lengthwise(Uniform(_PROMPT, _PROMPT), Uniform(_OUTPUT, _OUTPUT))
    await generator.closed_loop(endless(shape, seed), streams, seconds)


def _shift(record: Record, by_s: float) -> None:
    record.sent_s = None if record.sent_s is None else record.sent_s + by_s
    record.chunks_s = [at + by_s for at in record.chunks_s]


def _answered(record: Record, step_s: float) -> Answered:
    sent_s = record.at_s if record.sent_s is None else record.sent_s
    return Answered(sent_s - step_s, None if record.error else record.ttft_s, record.itl_s)


def _orders(server: Server, step_at: float) -> tuple[tuple[float, int], ...]:
    """What the planner ordered. `step_at` is CLOCK_MONOTONIC, in seconds."""
    assert server.state_root is not None
    path = StatePaths(server.state_root, NAMESPACE).decisions_file
    decisions = map(msgspec.json.decode, path.read_bytes().splitlines() if path.exists() else [])
    return tuple(
        (round(decision["at"] - step_at, 1), decision["order"]["workers"])
        for decision in decisions
        if decision.get("endpoint") == NAME and decision["order"] is not None
    )


def _show(outings: Sequence[Outing], targets: Targets, workers: int, adjustment_s: float) -> None:
    rows = []
    for policy in POLICIES:
        mine = [outing for outing in outings if outing.policy == policy]
        after = [answer for outing in mine for answer in outing.answers if answer.at_s >= 0]
        ttfts = [answer.ttft_s for answer in after if answer.ttft_s is not None]
        late = 1 - sum(map(targets.kept_by, after)) / max(len(after), 1)
        served = [outing.served_s for outing in mine if outing.served_s is not None]
        rows.append(
            [
                policy,
                f"{median(served):.0f}" if len(served) == len(mine) else "not in each round",
                ", ".join("-" if outing.served_s is None else f"{outing.served_s:.0f}" for outing in mine),
                f"{late:.1%}",
                f"{median(ttfts):.2f}" if ttfts else "-",
                f"{quantile(ttfts, 0.99):.2f}" if ttfts else "-",
                "; ".join(f"{at:.0f} s: {number}" for at, number in mine[0].orders if at < workers * adjustment_s),
            ]
        )
    table(
        f"A step from 1 to {workers} workers' worth of load, an adjustment interval of {adjustment_s:g} s; targets: "
        f"TTFT {targets.ttft_s:g} s, ITL {targets.itl_s * 1e3:g} ms for {_SHARE:.0%}",
        ["policy", "served after, s", "by round", "late", "TTFT p50, s", "TTFT p99, s", "ordered in the first round"],
        rows,
    )
