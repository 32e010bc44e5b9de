"""What moving a running request costs: the gap in its stream, and what the streams beside it notice.

Two real workers that lend each other KV, each with a few streams of its own. A stream of some length is started, and
moved to the other worker while it decodes: with its KV ahead of it; or cold, which is plain replay. Both ways and all
lengths take turns in one run, with a prompt of their own each time; with another revision beside, so do both servers.
Gaps are those of the client. What the streams beside it notice is their pace during the move against that just before,
when the same stream was decoding and nothing was ordered. The order is a command: by the time that it has started, the
stream is some tens of tokens longer.

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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.accounting import usage
from benchmarks.harness.calm import Patience
from benchmarks.harness.client import Completion, ServerError
from benchmarks.harness.load import client_of
from benchmarks.harness.models import HEAVY, MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress
from benchmarks.harness.servers import (
    BESIDE,
    OURS,
    Server,
    add_beside,
    add_override,
    in_turn,
    parse_overrides,
    running,
    sides_of,
    start_ours,
)
from benchmarks.harness.spread import median
from benchmarks.migration.drain import Drained, drain, show
from benchmarks.migration.orders import Orders, draw_prompt
from benchmarks.migration.report import ARMS, MOVE, Arm, Moved, Turns, gaps_of, report

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
_TOLD_WITHIN_S = 0.05
"""Time in which the server hears of a migration that has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--rounds", type=int, help=f"moves of each kind and length ({_ROUNDS})")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="ways to move (all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="tokens of the stream when it moves")
    parser.add_argument("--streams", type=int, default=4, help="other streams, on both workers together")
    parser.add_argument("--drains", type=int, default=3, help="drains of a worker with 16 streams")
    add_beside(parser)
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (2 if arguments.quick else _ROUNDS)
    arms = [arm for arm in ARMS if arguments.arms is None or arm.name in arguments.arms]
    folder = str(model_folder(arguments.model))
    settings = {**SETTINGS, **(_HEAVY if arguments.model == HEAVY else {}), **parse_overrides(arguments.override)}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        servers = {
            name: start_ours(Path(scratch, name), folder, "agg_router", settings, checkout=checkout)
            for name, checkout in sides_of(arguments).items()
        }
        async with running(*servers.values()):
            progress("waiting for two workers")
            stages = {}
            for name, server in servers.items():
                await server.ready()
                stages[name] = _Stage(name, Orders(server), arms, arguments.sizes, arguments.streams)
                await stages[name].warm_up()
            patience = Patience(0 if arguments.quick else _PATIENCE_S)
            for number in range(rounds):
                for stage in in_turn(stages.values(), number):
                    await patience.wait(process for server in servers.values() for process in server.processes)
                    await stage.round(number)
            for number in range(arguments.drains):
                for stage in in_turn(stages.values(), number):
                    stage.drained.append(await drain(stage.orders, number))
    return _report(stages)


def _report(stages: Mapping[str, _Stage]) -> Figures:
    figures = {
        name: {"moves": report(name, stage.found), "drains": show(name, stage.drained)}
        for name, stage in stages.items()
    }
    if BESIDE in stages:
        gaps = (gaps_of(stages[name].found) for name in (OURS, BESIDE))
        compare("moved", {"gap_s": "gap", "steps": "steps"}, *gaps)
    return figures.pop(OURS) | figures


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


async def _steps_of_all_sizes(server: Server) -> None:
    """Of so few tokens as come here. A worker's first step of each size takes 5 to 10 ms more, in which oneDNN makes
    itself ready for it."""
    draw = random.Random(2)
    async with client_of(server) as client:
        for tokens in range(1, _STEP_TOKENS + 1):
            for _ in range(2):
                # Two at a time: one for either worker.
                await asyncio.gather(*(client.complete(draw_prompt(draw, tokens), 1) for _ in range(2)))


@dataclass
class _Stage:
    """A server, and what was found there."""

    name: str
    orders: Orders
    arms: Sequence[Arm]
    sizes: Sequence[int]
    beside: int
    """Streams beside those that move."""
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    drained: list[Drained] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = self.orders.server
        self.found: dict[int, Turns] = {size: {arm: [] for arm in self.arms} for size in self.sizes}

    async def warm_up(self) -> None:
        """Have both workers do once what is slower the first time."""
        await self.orders.workers(2)
        async with _streams_beside(self.server, self.beside) as others:
            await _steps_of_all_sizes(self.server)
            for _ in range(2):  # the first ones make the connections between the workers
                await self._move(min(self.sizes), others, MOVE)

    async def round(self, number: int) -> None:
        """A move of each kind and length."""
        before = usage(self.server.processes)
        async with _streams_beside(self.server, self.beside) as others:
            for size in in_turn(self.sizes, number + 1):
                for arm in self.arms:
                    self.found[size][arm].append(await self._move(size, others, arm))
        foreign = usage(self.server.processes).since(before).foreign_cores
        told = ", ".join(f"{turns[self.arms[0]][-1].steps:.1f}" for turns in self.found.values())
        progress(f"{self.name}: round {number + 1}: gaps of {told} steps; others used {foreign:.2f} cores")

    async def _move(self, size: int, others: _Beside, arm: Arm) -> Moved:
        """A stream is moved when it has so many tokens."""
        await self.orders.level()
        async with self._stream(size) as (answer, found_at):
            ordered = time.monotonic()
            (result,) = await self.orders.move(answer.request_id, *(["--cold"] if arm.cold else []))
            if answer.failure or result.outcome != "migrated":
                raise ServerError(f"a stream of {size} tokens was not moved: {answer.failure or result.why}")
        pairs = list(itertools.pairwise(answer.chunks_s))
        # Not from order to answer: a command that starts takes CPU time, and makes gaps of its own.
        known_at = await self._known_at(answer.request_id)
        begun = known_at - (result.gap_s or 0.0) - (result.warm_s or 0.0) - _TOLD_WITHIN_S
        cut, ended = max((pair for pair in pairs if pair[1] >= begun and pair[0] <= known_at), key=_gap_s)
        begun = cut - (result.warm_s or 0.0)
        return Moved(
            result,
            step_s=_step_s([_gap_s(pair) for pair in pairs if pair[1] <= begun]),
            there_s=_step_s([_gap_s(pair) for pair in pairs if pair[0] >= ended]),
            gap_s=ended - cut,
            took_s=ended - begun,
            before_tokens_per_s=others.tokens_per_s(found_at, ordered),
            beside_tokens_per_s=others.tokens_per_s(begun, ended),
        )

    async def _known_at(self, request_id: str) -> float:
        """When the server knew that the request has moved."""
        (event,) = [each for each in await self.server.events("migration") if each.get("request") == request_id]
        moved_at: float = event["time"]
        return moved_at - time.time() + time.monotonic()

    @contextlib.asynccontextmanager
    async def _stream(self, size: int) -> AsyncIterator[tuple[Completion, float]]:
        """One that has come to this size, and when its decoding was seen first. Left, it is read a little further."""
        server, answer = self.server, Completion()
        prompt = draw_prompt(self.draw, size - _BEFORE_TOKENS)
        async with client_of(server) as client:
            asking = asyncio.create_task(client.complete(prompt, _MOST_TOKENS, answer))
            try:
                await _tokens(answer, 2, asking)
                found_at = time.monotonic()
                await _tokens(answer, _BEFORE_TOKENS, asking)
                yield answer, found_at
                await _tokens(answer, len(answer.chunks_s) + _AFTER_TOKENS, asking)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)


def _gap_s(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


def _step_s(times: Sequence[float]) -> float:
    """Of times between tokens. A client that gets most of them in bursts sees no time between them."""
    return median(times) or statistics.fmean(times)


async def _tokens(answer: Completion, number: int, asking: asyncio.Task[Completion]) -> None:
    """Wait until so many have come."""
    while len(answer.chunks_s) < number and not asking.done():  # noqa: ASYNC110  # nothing tells of them
        await asyncio.sleep(0.002)
