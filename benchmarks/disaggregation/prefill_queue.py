"""How many jobs the prefill queue moves, against questions and answers of the same NATS server without JetStream.

NATS runs as `dynamo serve` starts it: its binary and configuration, the queue on disk, each party with a connection of
its own. All parties live in this process: what Python's NATS client costs them is in every figure, of both kinds alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness.accounting import CLIENT, Process, Usage, add, usage
from benchmarks.harness.calm import Patience
from benchmarks.harness.nats import nats_server
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import NAMESPACE
from benchmarks.harness.spread import Interval, bootstrap, median, quantile
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.prefill_queue import (
    LIMITS,
    PrefillConsumer,
    PrefillQueue,
    TakenJob,
    create_prefill_queue,
)
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.work import PrefillJob
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects

SUMMARY = "jobs per second through the prefill queue, against plain request-reply on the same NATS"
_ROUNDS = 10
_TURN_S = 1.5
_WARM_UP_S = 0.3
_PATIENCE_S = 30.0
_TAKE_S = 1.0
_ANSWER_WITHIN_S = 10.0
_JOB_LASTS_S = 3600.0
_MOST_JOBS = 1_000_000
"""Room for what a turn publishes and nobody takes. It is the one setting that is not that of `dynamo serve`."""
_ASKED = "bench.answer"
_ROLE = "nats"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns of each case ({_ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"length of a turn ({_TURN_S:g})")


@dataclass(frozen=True)
class Case:
    """`at_once` requests or jobs are under way all the time. With takers, a job counts when its taker's word that it
    is done has been confirmed; without, when it is stored."""

    what: str
    at_once: int
    takers: int = 0
    batch: int = 1
    """Jobs that a taker takes at once."""

    @property
    def name(self) -> str:
        takers = f", {self.takers} taker{'s' if self.takers > 1 else ''} of {self.batch}" if self.takers else ""
        return f"{self.what}, {self.at_once} at once{takers}"


_ASK, _PUBLISH, _WHOLE = "request and reply", "publish", "publish, take, done"

CASES = (
    Case(_ASK, 1),
    Case(_PUBLISH, 1),
    Case(_WHOLE, 1, takers=1),
    Case(_ASK, 16),
    Case(_PUBLISH, 16),
    Case(_WHOLE, 16, takers=1, batch=4),
    Case(_WHOLE, 16, takers=4, batch=4),
)
_BASELINES = {1: CASES[0], 16: CASES[3]}
"""By jobs at once: the case without a queue to compare with."""


@dataclass(frozen=True)
class Turn:
    """What one turn of a case brought."""

    took_s: Sequence[float]
    """By request or job."""
    seconds: float
    used: Usage

    @property
    def per_s(self) -> float:
        return len(self.took_s) / self.seconds


@dataclass
class Bench:
    """One NATS server, and connections of all parties to it."""

    address: BusAddress
    processes: tuple[Process, ...]
    asking: Bus
    publishing: Bus
    taking: list[Bus]
    subjects: Subjects = field(default_factory=lambda: Subjects(NAMESPACE, FIRST_OF_MAIN))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def job(self) -> PrefillJob:
        """One like those of a frontend, in its size, too."""
        number = next(self.numbers)
        return PrefillJob(
            job=f"{number:032x}",
            request_id=f"cmpl-{number:032x}",
            frontend=f"{0:016x}",
            tokens=2400,
            valid_s=_JOB_LASTS_S,
        )


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (2 if arguments.quick else _ROUNDS)
    seconds = arguments.seconds or (_TURN_S / 3 if arguments.quick else _TURN_S)
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    turns: dict[Case, list[Turn]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        async with _bench(Path(scratch, "nats")) as bench:
            for case in CASES:
                await _turn(bench, case, _WARM_UP_S)
            for number in range(rounds):
                await patience.wait(bench.processes)
                for case in CASES if number % 2 else reversed(CASES):
                    turns[case].append(await _turn(bench, case, seconds))
                rates = ", ".join(f"{turns[case][-1].per_s:.0f}" for case in CASES)
                progress(f"round {number + 1}: {rates} per second")
    return _report(turns)


@contextlib.asynccontextmanager
async def _bench(directory: Path) -> AsyncIterator[Bench]:
    """A server with an empty queue, which ends with the block."""
    buses: list[Bus] = []
    async with nats_server(directory) as (address, processes):
        try:
            buses += [await Bus.connect(address, name=f"party {number}") for number in range(7)]
            answering, asking, publishing, *taking = buses
            bench = Bench(address, processes, asking, publishing, taking)

            async def answer(message: RawMessage) -> None:
                await answering.publish(message.reply, message.data)

            await answering.subscribe(_ASKED, answer)
            await create_prefill_queue(publishing, bench.subjects, replace(LIMITS, messages=_MOST_JOBS))
            yield bench
        finally:
            for bus in buses:
                await bus.close()


async def _turn(bench: Bench, case: Case, seconds: float) -> Turn:
    """The case for so long, and until all that is under way then has ended. The queue is empty afterwards."""
    queue = PrefillQueue(bench.publishing, bench.subjects)
    waiting: dict[str, asyncio.Future[None]] = {}
    payload = codec.encode(bench.job())

    async def ask() -> None:
        await bench.asking.request(_ASKED, payload, timeout_s=_ANSWER_WITHIN_S)

    async def publish() -> None:
        await queue.publish(bench.job())

    async def see_through() -> None:
        job = bench.job()
        done = waiting[job.job] = asyncio.get_running_loop().create_future()
        await queue.publish(job)
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            await done

    action = {_ASK: ask, _PUBLISH: publish, _WHOLE: see_through}[case.what]
    async with _takers(bench, case, waiting):
        before, begin = usage(bench.processes), time.monotonic()
        took_s = await _repeatedly(action, case.at_once, begin + seconds)
        turn = Turn(took_s, time.monotonic() - begin, usage(bench.processes).since(before))
    await queue.purge()
    return turn


async def _repeatedly(action: Callable[[], Awaitable[None]], at_once: int, end: float) -> list[float]:
    """Seconds that each took."""
    took_s: list[float] = []

    async def loop() -> None:
        while (begin := time.monotonic()) < end:
            await action()
            took_s.append(time.monotonic() - begin)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(loop())
    return took_s


@contextlib.asynccontextmanager
async def _takers(bench: Bench, case: Case, waiting: dict[str, asyncio.Future[None]]) -> AsyncIterator[None]:
    """Workers that take jobs and say at once that they are done."""
    takers = [PrefillConsumer(bus, bench.subjects) for bus in bench.taking[: case.takers]]

    async def finish(job: TakenJob) -> None:
        await job.done()
        waiting.pop(job.job.job).set_result(None)

    async def work(taker: PrefillConsumer) -> None:
        while True:
            await asyncio.gather(*(finish(job) for job in await taker.take(case.batch, _TAKE_S)))

    tasks = [asyncio.create_task(work(taker)) for taker in takers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for taker in takers:
            await taker.close()
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            raise BusError(f"a taker ended: {end!r}")


_HEADERS = (
    "what",
    "per second [95 %]",
    "of request and reply [95 %]",
    "p50 ms",
    "p99 ms",
    "NATS CPU, µs each",
    "this process, µs each",
)


def _report(turns: dict[Case, list[Turn]]) -> Figures:
    results = [_summary(case, turns) for case in turns]
    table("The prefill queue", _HEADERS, [_row(result) for result in results])
    return {"cases": results}


def _summary(case: Case, turns: dict[Case, list[Turn]]) -> Figures:
    mine, baseline = turns[case], turns[_BASELINES[case.at_once]]
    took_s = [each for turn in mine for each in turn.took_s]
    used = add(turn.used for turn in mine)
    return {
        "case": case.name,
        "per_s": vars(bootstrap([turn.per_s for turn in mine])),
        "ratio": vars(bootstrap([one.per_s / other.per_s for one, other in zip(mine, baseline, strict=True)])),
        "took_s": {"p50": median(took_s), "p99": quantile(took_s, 0.99)},
        "cpu_us": {role: 1e6 * used.roles.get(role, 0.0) / len(took_s) for role in (_ROLE, CLIENT)},
        "foreign_cores": used.foreign_cores,
        "count": len(took_s),
    }


def _row(result: Figures) -> list[str]:
    return [
        result["case"],
        Interval(**result["per_s"]).shown(0),
        Interval(**result["ratio"]).shown(2),
        milliseconds(result["took_s"]["p50"], 2),
        milliseconds(result["took_s"]["p99"], 2),
        *(f"{result['cpu_us'][role]:.0f}" for role in (_ROLE, CLIENT)),
    ]
