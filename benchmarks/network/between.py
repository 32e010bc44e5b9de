"""What KV costs between two machines: a pull of some tokens by each way, against computing them, and the gap of a
stream that migrates.

A server with a frontend, a router, the bus and a worker in this network namespace, and a second worker in another one
behind a line that delays (benchmarks/harness/relay.py), so that all of its messages and all KV take that time. Needs
root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.client import Completion
from benchmarks.harness.load import client_of
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.relay import Conditions
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import (
    ENGINE_ENVIRONMENT,
    NAMESPACE,
    Server,
    ServerError,
    add_override,
    parse_overrides,
    running,
    start_ours,
)
from benchmarks.harness.spread import median
from benchmarks.harness.two_machines import TwoMachines, two_machines, why_not
from benchmarks.migration.orders import Orders, draw_prompt
from benchmarks.network.pulls import Asker
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.paths import STATE_DIR_VARIABLE, StatePaths

SUMMARY = "KV between two machines with a delay between them: pulls by each way, and the gap of a migration"
_SETTINGS = {
    "VllmWorker.kv-transfer": True,
    "VllmWorker.max-model-len": 8192,
    "Frontend.max-model-len": 8192,
    # They ask for it on a machine with other users.
    "VllmWorker.trust-local-users": True,
}
_CLOSED, _STREAM = "closed", "stream"
_SIZES = (512, 2048, 8000)
_MOVED = 2048
_ROUNDS = 5
_DELAYS_MS = (0.0, 25.0)
_BEFORE, _AFTER, _MOST = 48, 24, 400
"""Tokens of a stream before it moves, after that, and in all."""
_FAR_CORE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--way", choices=(_CLOSED, _STREAM), default=_CLOSED, help="how KV crosses machines")
    parser.add_argument("--delays", type=float, nargs="+", default=list(_DELAYS_MS), help="of each way of the line, ms")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="tokens pulled")
    parser.add_argument("--moved", type=int, default=_MOVED, help="tokens of a stream that migrates")
    parser.add_argument("--rounds", type=int, help=f"pulls of each size, and migrations each way ({_ROUNDS})")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    if (reason := why_not()) is not None:
        raise ServerError(reason)
    rounds = arguments.rounds or (2 if arguments.quick else _ROUNDS)
    folder = str(model_folder(arguments.model))
    settings = {**_SETTINGS, "VllmWorker.ServiceArgs.workers": 1, **parse_overrides(arguments.override)}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, two_machines() as machines:
        way = ("--kv-network", machines.network) if arguments.way == _CLOSED else ("--kv-stream",)
        options = ("--bus-host", machines.here, *way)
        server = start_ours(Path(scratch), folder, "agg_router", settings, options)
        async with running(server):
            progress("waiting for a worker here, and one on the other machine")
            await server.ready()
            async with _far_worker(server, machines), PresenceLog(server) as log:
                stage = await _Stage.of(server, log)
                found = {}
                for delay_ms in arguments.delays:
                    machines.line.set(Conditions(delay_s=delay_ms / 1e3))
                    progress(f"{delay_ms:g} ms each way")
                    found[delay_ms] = await _measure(stage, arguments.sizes, arguments.moved, rounds)
    return _report(arguments.way, found)


@contextlib.asynccontextmanager
async def _far_worker(server: Server, machines: TwoMachines) -> AsyncIterator[None]:
    module = "benchmarks.network.far_worker"
    command = machines.command(machines.names[1], sys.executable, "-m", module, NAMESPACE, str(_FAR_CORE))
    with server.log.open("ab") as log:
        far = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ENGINE_ENVIRONMENT, STATE_DIR_VARIABLE: str(server.state_root)},
        )
    assert far.stdin is not None
    assert far.stdout is not None
    try:
        async for line in far.stdout:
            if line == b"ready\n":
                break
        else:
            raise ServerError(f"the other machine's worker has ended:\n{server.last_lines()}")
        yield
        far.stdin.close()
        await far.wait()
    finally:
        if far.returncode is None:
            far.kill()
            await far.wait()


@dataclass(frozen=True)
class Pulled:
    """Times to the first token of a prompt whose KV is pulled, cached already, and computed."""

    pulled_s: float
    cached_s: float
    computed_s: float


@dataclass(frozen=True)
class Moved:
    """A migration to the other machine (`away`) or back: the longest silence around it that the client saw, the same at
    the frontend in steps, and the time from the order to the cut."""

    away: bool
    gap_s: float
    gap_steps: float
    warm_s: float
    step_s: float
    """Median time between tokens before."""


@dataclass
class _Stage:
    server: Server
    asker: Asker
    near: Presence
    far: Presence
    draw: random.Random

    @classmethod
    async def of(cls, server: Server, log: PresenceLog) -> _Stage:
        assert server.state_root is not None
        first = await log.ready_worker()
        second = await log.ready_worker(frozenset({first.lease}))
        near, far = sorted((first, second), key=lambda each: each.watcher)
        bus = await Bus.connect(BusAddress.load(StatePaths(server.state_root, NAMESPACE).bus_file), name="asker")
        asker = Asker(bus, Subjects(NAMESPACE, FIRST_OF_MAIN))
        await asker.start()
        return cls(server, asker, near, far, random.Random(1))

    async def pull(self, size: int) -> Pulled:
        """The other machine's worker pulls."""
        # A token more than is pulled: the last one is computed in any case.
        prompt, other = (draw_prompt(self.draw, size + 1) for _ in range(2))
        await self.asker.first_token(self.near.lease, prompt)
        pulled_s, read = await self.asker.first_token(self.far.lease, prompt, self.near.lease)
        cached_s, cached = await self.asker.first_token(self.far.lease, prompt)
        computed_s, none = await self.asker.first_token(self.far.lease, other)
        if (read, cached, none) != (size, size, 0):
            raise ServerError(f"of {size} tokens {read} were pulled, {cached} cached then, {none} of others")
        return Pulled(pulled_s, cached_s, computed_s)

    async def move(self, size: int) -> list[Moved]:
        """A stream is moved when it has so many tokens, and back when it has some more."""
        answer, prompt = Completion(), draw_prompt(self.draw, size - _BEFORE)
        async with client_of(self.server) as client:
            asking = asyncio.create_task(client.complete(prompt, _MOST, answer))
            try:
                await _tokens(answer, _BEFORE, asking)
                return [await self._move(answer, asking) for _ in range(2)]
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _move(self, answer: Completion, asking: asyncio.Task[Completion]) -> Moved:
        first = len(answer.chunks_s)
        (result,) = await Orders(self.server).move(answer.request_id)
        if answer.failure or result.outcome != "migrated":
            raise ServerError(f"a stream was not moved: {answer.failure or result.why}")
        await _tokens(answer, len(answer.chunks_s) + _AFTER, asking)
        gaps = [b - a for a, b in itertools.pairwise(answer.chunks_s)]
        away = result.worker in (self.far.lease, self.far.watcher)
        assert result.gap_steps is not None
        assert result.warm_s is not None
        return Moved(away, max(gaps[first - 1 :]), result.gap_steps, result.warm_s, median(gaps[first - 24 : first]))


async def _tokens(answer: Completion, number: int, asking: asyncio.Task[Completion]) -> None:
    """Wait until so many have come."""
    while len(answer.chunks_s) < number and not asking.done():  # noqa: ASYNC110  # nothing tells of them
        await asyncio.sleep(0.002)


@dataclass
class _Found:
    pulls: dict[int, list[Pulled]]
    moves: list[Moved]


async def _measure(stage: _Stage, sizes: Sequence[int], moved: int, rounds: int) -> _Found:
    # The first ones make the connections.
    await stage.pull(min(sizes))
    await stage.move(moved)
    found = _Found({size: [] for size in sizes}, [])
    for number in range(rounds):
        for size in sizes:
            found.pulls[size].append(await stage.pull(size))
        found.moves += await stage.move(moved)
        last = ", ".join(milliseconds(pulls[-1].pulled_s, 0) for pulls in found.pulls.values())
        progress(f"round {number + 1}: first tokens after {last} ms, gap {milliseconds(found.moves[-1].gap_s)} ms")
    return found


_PULLS = ("delay ms", "tokens", "first token ms: pulled", "cached", "computed", "the pull costs ms", "round trips")
_MOVES = ("delay ms", "from", "gap ms", "step ms", "steps at the frontend", "round trips", "until the cut ms")


def _report(way: str, found: dict[float, _Found]) -> Figures:
    pulls = [_pull_row(delay, size, each) for delay, one in found.items() for size, each in one.pulls.items()]
    moves = [_move_row(delay, away, one.moves) for delay, one in found.items() for away in (True, False)]
    table(f"Pulls between machines ({way})", _PULLS, pulls)
    table(f"Migrations between machines ({way})", _MOVES, moves)
    return {
        "way": way,
        "delays": [
            {
                "delay_ms": delay,
                "pulls": {str(size): [vars(each) for each in pulls] for size, pulls in one.pulls.items()},
                "moves": [vars(each) for each in one.moves],
            }
            for delay, one in found.items()
        ],
    }


def _pull_row(delay_ms: float, size: int, pulls: Sequence[Pulled]) -> list[str]:
    cost_s = median([each.pulled_s - each.cached_s for each in pulls])
    times = [median([getattr(each, name) for each in pulls]) for name in ("pulled_s", "cached_s", "computed_s")]
    return [f"{delay_ms:g}", str(size), *map(milliseconds, times), milliseconds(cost_s), _trips(cost_s, delay_ms)]


def _move_row(delay_ms: float, away: bool, moves: Sequence[Moved]) -> list[str]:
    kind = [each for each in moves if each.away == away]
    gap_s, step_s = median([each.gap_s for each in kind]), median([each.step_s for each in kind])
    return [
        f"{delay_ms:g}",
        "here" if away else "there",
        milliseconds(gap_s),
        milliseconds(step_s),
        f"{median([each.gap_steps for each in kind]):.1f}",
        _trips(gap_s, delay_ms),
        milliseconds(median([each.warm_s for each in kind])),
    ]


def _trips(seconds: float, delay_ms: float) -> str:
    """In round trips of the line."""
    return f"{seconds * 1e3 / (2 * delay_ms):.1f}" if delay_ms else "-"
