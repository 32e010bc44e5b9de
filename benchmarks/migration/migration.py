"""What moving a running request costs: the gap in its stream, and what the streams beside it notice.

Two real workers that lend each other KV, each with a few streams of its own. A stream of some length is started, and
moved to the other worker while it decodes: with its KV ahead of it; or cold, which is plain replay. Both ways and all
lengths take turns in one run, with a prompt of their own each time. Gaps are those of the client. What the streams
beside it notice is their pace during the move against that just before, when the same stream was decoding and nothing
moved.

Another way would be to stop, pull everything and go on. Its gap is about what `prefix-pull --beside 2` shows: the time
to ask and pin, and the time to a first token whose KV was pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.accounting import usage
from benchmarks.harness.calm import Patience
from benchmarks.harness.load import client_of
from benchmarks.harness.models import HEAVY, MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, progress
from benchmarks.harness.servers import Server, ServerError, add_override, parse_overrides, running, start_ours
from benchmarks.harness.spread import median
from benchmarks.migration.drain import drains
from benchmarks.migration.orders import Orders, draw_prompt
from benchmarks.migration.report import ARMS, MOVE, Arm, Moved, Turns, report
from dynamo_local.load.results.records import Completion

SUMMARY = "a running request is moved: the gap in its stream, against plain replay, and what other streams notice"
SETTINGS = {
    "VllmWorker.kv-transfer": True,
    "VllmWorker.max-model-len": 8192,
    "Frontend.max-model-len": 8192,
    "VllmWorker.drain-timeout-s": 60,
}
_HEAVY = {"VllmWorker.ServiceArgs.envs.VLLM_CPU_KVCACHE_SPACE": "2"}
"""GiB of KV cache, which has 61 KB for a token of that model."""
_SIZES = (256, 512, 1024, 2048, 4096, 8000)
_ROUNDS = 7
_BEFORE_TOKENS = 48
"""Of the stream that moves, before it does."""
_MOST_TOKENS = 200
"""Of it in all: more than come while it moves. Then it is left."""
_AFTER_TOKENS = 24
"""Of it after its move."""
_BESIDE_TOKENS = 3000
_STEP_TOKENS = 16
"""A step after a cut computes the few tokens that came since, and one of each other stream."""
_PATIENCE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--rounds", type=int, help=f"moves of each kind and length ({_ROUNDS})")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="ways to move (all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="tokens of the stream when it moves")
    parser.add_argument("--beside", type=int, default=4, help="other streams, on both workers together")
    parser.add_argument("--drains", type=int, default=3, help="drains of a worker with 16 streams")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (2 if arguments.quick else _ROUNDS)
    arms = [arm for arm in ARMS if arguments.arms is None or arm.name in arguments.arms]
    folder = str(model_folder(arguments.model))
    settings = {**SETTINGS, **(_HEAVY if arguments.model == HEAVY else {}), **parse_overrides(arguments.override)}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), folder, "agg_router", settings)
        async with running(server):
            progress("waiting for two workers")
            await server.ready()
            async with Orders(server) as orders:
                await orders.workers(2)
                patience = Patience(0 if arguments.quick else _PATIENCE_S)
                moved = await _moves(server, orders, arms, arguments.sizes, rounds, arguments.beside, patience)
                drained = await drains(server, orders, arguments.drains)
    return {"moves": report(moved), "drains": drained}


@dataclass
class _Beside:
    """Streams that decode all the time."""

    answers: list[Completion] = field(default_factory=list)

    async def keep_on(self, server: Server, number: int) -> None:
        draw = random.Random(number)
        async with client_of(server) as client:
            while True:
                answer = Completion()
                self.answers.append(answer)
                await client.complete(draw_prompt(draw, 20), _BESIDE_TOKENS, answer)

    def tokens_per_s(self, begin: float, end: float) -> float:
        """Of all streams together then. A token comes little by little, from the one before it on."""
        tokens = sum(
            max(min(later, end) - max(earlier, begin), 0.0) / (later - earlier)
            for answer in self.answers
            for earlier, later in itertools.pairwise(answer.chunks_s)
            if later > begin and earlier < end and later > earlier
        )
        return tokens / (end - begin)


@contextlib.asynccontextmanager
async def _streams_beside(server: Server, number: int) -> AsyncIterator[_Beside]:
    beside = _Beside()
    tasks = [asyncio.create_task(beside.keep_on(server, each)) for each in range(number)]
    try:
        yield beside
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _moves(
    server: Server,
    orders: Orders,
    arms: Sequence[Arm],
    sizes: Sequence[int],
    rounds: int,
    beside: int,
    patience: Patience,
) -> dict[int, Turns]:
    stage = _Stage(server, orders, random.Random(1))
    found: dict[int, Turns] = {size: {arm: [] for arm in arms} for size in sizes}
    async with _streams_beside(server, beside) as others:
        await _steps_of_all_sizes(server)
        for _ in range(2):  # the first ones make the connections between the workers
            await stage.move(min(sizes), others, MOVE)
        for number in range(rounds):
            await patience.wait(server.processes)
            before = usage(server.processes)
            for size in sizes if number % 2 else reversed(sizes):
                for arm in arms:
                    found[size][arm].append(await stage.move(size, others, arm))
            foreign = usage(server.processes).since(before).foreign_cores
            told = ", ".join(f"{found[size][arms[0]][-1].steps:.1f}" for size in sizes)
            progress(f"round {number + 1}: gaps of {told} steps; others used {foreign:.2f} cores")
    return found


async def _steps_of_all_sizes(server: Server) -> None:
    """Of so few tokens as come here. A worker's first step of each size takes 5 to 10 ms more, in which oneDNN makes
    itself ready for it."""
    draw = random.Random(2)
    async with client_of(server) as client:
        for tokens in range(1, _STEP_TOKENS + 1):
            for _ in range(2):
                # Two at a time: one for either worker.
                await asyncio.gather(*(client.complete(draw_prompt(draw, tokens), 1) for _ in range(2)))


@dataclass(frozen=True)
class _Stage:
    server: Server
    orders: Orders
    draw: random.Random

    async def move(self, size: int, others: _Beside, arm: Arm) -> Moved:
        """A stream is moved when it has so many tokens."""
        await self.orders.level()
        async with self._stream(size) as (answer, request_id, found_at):
            begun = time.monotonic()
            result = await self.orders.move(request_id, cold=arm.cold)
            ended = time.monotonic()
            if answer.error or result.outcome != "migrated":
                raise ServerError(f"a stream of {size} tokens was not moved: {answer.failure or result.why}")
        earlier = [b - a for a, b in itertools.pairwise(answer.chunks_s) if b <= begun]
        around = [b - a for a, b in itertools.pairwise(answer.chunks_s) if b >= begun and a <= ended]
        before, meanwhile = others.tokens_per_s(found_at, begun), others.tokens_per_s(begun, ended)
        later = [b - a for a, b in itertools.pairwise(answer.chunks_s) if a >= ended]
        return Moved(result, _step_s(earlier), _step_s(later), max(around), ended - begun, before, meanwhile)

    @contextlib.asynccontextmanager
    async def _stream(self, size: int) -> AsyncIterator[tuple[Completion, str, float]]:
        """One that has come to this size, and when its decoding was seen first. Left, it is read a little further."""
        server, answer = self.server, Completion()
        prompt = draw_prompt(self.draw, size - _BEFORE_TOKENS)
        async with client_of(server) as client:
            asking = asyncio.create_task(client.complete(prompt, _MOST_TOKENS, answer))
            try:
                await _tokens(answer, 2, asking)
                request_id = await self.orders.find(len(prompt))
                found_at = time.monotonic()
                await _tokens(answer, _BEFORE_TOKENS, asking)
                yield answer, request_id, found_at
                await _tokens(answer, len(answer.chunks_s) + _AFTER_TOKENS, asking)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)


def _step_s(times: Sequence[float]) -> float:
    """Of times between tokens. A client that gets most of them in bursts sees no time between them."""
    return median(times) or statistics.fmean(times)


async def _tokens(answer: Completion, number: int, asking: asyncio.Task[Completion]) -> None:
    """Wait until so many have come."""
    while len(answer.chunks_s) < number and not asking.done():  # noqa: ASYNC110  # nothing tells of them
        await asyncio.sleep(0.002)
