"""What one frontend carries, with an engine that costs nothing: the mocker.

The frontend is the real one (vLLM's OpenAI server before our dispatcher), alone on one core. Everything else, this
client included, has the other cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import Usage, add
from benchmarks.harness.calm import Patience
from benchmarks.harness.load import Load, Shape, closed_loop, pooled_gaps
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import Server, running, start_ours
from benchmarks.harness.spread import Interval, bootstrap, median, quantile
from dynamo_local.supervisor.upkeep.cpu_affinity import bind

SUMMARY = "requests and tokens per second that one frontend carries, on the mocker"
FRONTEND_CORE = 0
_SETTLE_S = 0.5
_PATIENCE_S = 60.0

_MOCKER: Mapping[str, Any] = {
    "VllmWorker.engine": "mocker",
    # The tokenizer's printable tokens: half a character would be held back until the other half comes.
    "VllmWorker.mocker-vocab-size": 127,
    "VllmWorker.mocker-kv-blocks": 16384,
    "VllmWorker.mocker-max-num-seqs": 512,
    "VllmWorker.mocker-max-num-batched-tokens": 16384,
    "VllmWorker.mocker-prefill-us-per-token": 0,
    "VllmWorker.mocker-decode-us-per-seq": 0,
    "Frontend.max-requests": 1024,
}


@dataclass(frozen=True)
class Case:
    """A kind of load. `step_ms` is how long each step of the mocker takes."""

    name: str
    step_ms: float
    streams: int
    shape: Shape


CASES = (
    Case("one token a request", 0, 32, Shape(min_tokens=1, max_tokens=1)),
    Case("as fast as it can", 0, 48, Shape(min_tokens=64, max_tokens=192)),
    Case("a step every 10 ms", 10, 1, Shape(min_tokens=64, max_tokens=192)),
    Case("a step every 10 ms", 10, 16, Shape(min_tokens=64, max_tokens=192)),
    Case("a step every 10 ms", 10, 48, Shape(min_tokens=64, max_tokens=192)),
    Case("a step every 30 ms", 30, 48, Shape(min_tokens=32, max_tokens=96)),
    Case("a step every 30 ms", 30, 128, Shape(min_tokens=32, max_tokens=96)),
)

_HEADERS = (
    "load",
    "streams",
    "requests/s",
    "tokens/s [95 %]",
    "tokens/event",
    "tokens/s of a full core",
    "TTFT p50/p99 ms",
    "step p50/p99 ms",
    "frontend core used",
    "worker host",
    "nats",
    "client",
    "failed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="turns of each load (4)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 4)
    model = str(model_folder(RANDOM))
    results = []
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    for step_ms in sorted({case.step_ms for case in CASES}):
        cases = [case for case in CASES if case.step_ms == step_ms]
        loads = await _measure(model, step_ms, cases, rounds, arguments.seconds, patience)
        results += [_summary(case, turns) for case, turns in zip(cases, loads, strict=True)]
    table("One frontend on one core", _HEADERS, [_row(result) for result in results])
    _cpu_table(results)
    return {"cases": results}


async def _measure(
    model: str, step_ms: float, cases: Sequence[Case], rounds: int, seconds: float, patience: Patience
) -> list[list[Load]]:
    """The turns of each case, all on one server."""
    turns: list[list[Load]] = [[] for _ in cases]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        settings = {**_MOCKER, "VllmWorker.mocker-step-base-ms": step_ms}
        server = start_ours(Path(scratch), model, "agg", settings)
        async with running(server):
            progress(f"waiting for a server whose steps take {step_ms:g} ms")
            await server.ready()
            _place(server)
            await closed_loop(server, streams=8, seconds=2, seed=-1, shape=Shape())
            for number in range(rounds):
                for case, mine in zip(cases, turns, strict=True):
                    await asyncio.sleep(_SETTLE_S)
                    await patience.wait(server.processes)
                    load = await closed_loop(
                        server, streams=case.streams, seconds=seconds, seed=number, shape=case.shape
                    )
                    mine.append(load)
                    progress(f"{case.name}, {case.streams} streams, round {number + 1}: {load.tokens_per_s:.0f}/s")
    return turns


def _place(server: Server) -> None:
    frontend = server.of_role("frontend")
    rest = os.sched_getaffinity(0) - {FRONTEND_CORE} or {FRONTEND_CORE}
    bind((process.pid for process in frontend), {FRONTEND_CORE})
    bind((process.pid for process in server.processes if process not in frontend), rest)
    os.sched_setaffinity(0, rest)


def _summary(case: Case, loads: Sequence[Load]) -> Figures:
    used = add(load.used for load in loads)
    tokens, events = sum(load.tokens for load in loads), sum(load.events for load in loads)
    ttfts, gaps = [t for load in loads for t in load.ttfts_s], pooled_gaps(loads)
    return {
        "load": case.name,
        "streams": case.streams,
        "requests_per_s": median([load.requests_per_s for load in loads]),
        "tokens_per_s": vars(bootstrap([load.tokens_per_s for load in loads])),
        "tokens_per_event": tokens / events if events else None,
        "tokens_per_frontend_core_s": tokens / used.roles["frontend"] if used.roles.get("frontend") else None,
        "ttft_s": [quantile(ttfts, share) for share in (0.5, 0.99)] if ttfts else None,
        "gap_s": [quantile(gaps, share) for share in (0.5, 0.99)] if gaps else None,
        "cores_used": {role: spent / used.at for role, spent in used.roles.items()},
        "cpu_us_per_token": _per_token(used, tokens),
        "foreign_cores": used.foreign_cores,
        "failures": [why for load in loads for why in load.failures],
    }


def _per_token(used: Usage, tokens: int) -> Figures:
    return {role: 1e6 * spent / tokens for role, spent in used.roles.items()} if tokens else {}


def _row(result: Figures) -> list[str]:
    cores = result["cores_used"]
    return [
        result["load"],
        str(result["streams"]),
        f"{result['requests_per_s']:.0f}",
        Interval(**result["tokens_per_s"]).shown(0),
        f"{result['tokens_per_event'] or 0:.2f}",
        f"{result['tokens_per_frontend_core_s'] or 0:.0f}",
        " / ".join(milliseconds(value) for value in result["ttft_s"] or (None,)),
        " / ".join(milliseconds(value) for value in result["gap_s"] or (None,)),
        *(f"{cores.get(role, 0):.2f}" for role in ("frontend", "worker host", "nats", "client")),
        str(len(result["failures"])),
    ]


def _cpu_table(results: Sequence[Figures]) -> None:
    roles = sorted({role for result in results for role in result["cpu_us_per_token"]})
    rows = [
        [result["load"], str(result["streams"]), *(f"{result['cpu_us_per_token'].get(role, 0):.0f}" for role in roles)]
        for result in results
    ]
    table("CPU microseconds per token", ("load", "streams", *roles), rows)
