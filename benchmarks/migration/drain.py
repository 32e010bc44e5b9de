"""How long a worker with many long streams takes to drain, when they move away."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.accounting import is_alive
from benchmarks.harness.client import Completion, ServerError
from benchmarks.harness.load import client_of
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import Server
from benchmarks.harness.spread import median
from benchmarks.migration.orders import Orders, draw_prompt

_STREAMS = 16
_PROMPTS = (200, 3000)
"""Shortest and longest."""
_TOKENS = 4000
_LOOK_S = 0.01


@dataclass(frozen=True)
class Drained:
    """A drain. Times are seconds from SIGTERM."""

    left_s: float
    """Until the last stream had left the worker."""
    ended_s: float
    """Until its process had ended."""
    gaps_s: tuple[float, ...]
    """Longest silence of each stream, from SIGTERM until it had moved."""
    failures: tuple[str, ...]


def show(side: str, found: Sequence[Drained]) -> list[Figures]:
    """Print how drains went, and return the figures."""
    rows = [
        [
            f"{each.left_s:.2f}",
            f"{each.ended_s:.2f}",
            milliseconds(median(each.gaps_s), 0),
            milliseconds(max(each.gaps_s), 0),
            str(len(each.failures)),
        ]
        for each in found
    ]
    if found:
        table(
            f"A worker with {_STREAMS} streams of {_PROMPTS[0]:,} to {_PROMPTS[1]:,} tokens gets SIGTERM, {side}",
            ("streams gone, s", "process ended, s", "gap p50 ms", "longest", "failed"),
            rows,
        )
    return [vars(each) for each in found]


async def drain(orders: Orders, number: int) -> Drained:
    """Drain a worker of two."""
    server = orders.server
    first, second = await orders.workers(2)
    draw = random.Random(100 + number)
    answers = [Completion() for _ in range(_STREAMS)]
    reading = [asyncio.create_task(_stream(server, draw.randint(*_PROMPTS), draw.random(), each)) for each in answers]
    try:
        while any(not answer.chunks_s for answer in answers):  # noqa: ASYNC110  # nothing tells of them
            await asyncio.sleep(_LOOK_S)
        for result in await orders.move("--from", second["watcher"]):
            if result.outcome != "migrated":
                raise ServerError(f"a stream could not be moved: {result.why}")
        told, told_at = time.monotonic(), time.time()
        process = next(each for each in server.processes if each.pid == first["pid"])
        os.kill(process.pid, signal.SIGTERM)
        while is_alive(process):  # noqa: ASYNC110  # a foreign process
            await asyncio.sleep(_LOOK_S)
        ended = time.monotonic()
        moved = [event for event in await server.events("migration") if event["time"] > told_at]
        left = told + max(event["time"] for event in moved) - told_at
        gaps = tuple(_longest(answer.chunks_s, told, left) for answer in answers)
        failures = tuple(answer.failure for answer in answers if answer.failure)
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    await orders.workers(2)
    server.refresh()
    progress(f"{server.name}: drain {number + 1}: empty after {left - told:.2f} s, ended after {ended - told:.2f} s")
    return Drained(left - told, ended - told, gaps, failures)


def _longest(times: Sequence[float], begin: float, end: float) -> float:
    return max(b - a for a, b in itertools.pairwise(times) if b >= begin and a <= end)


async def _stream(server: Server, tokens: int, seed: float, answer: Completion) -> None:
    prompt = draw_prompt(random.Random(seed), tokens)
    async with client_of(server) as client:
        await client.complete(prompt, _TOKENS, answer)
