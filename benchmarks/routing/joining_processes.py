"""A worker that joins real processes: what the router finds in its cache, with and without hot prefixes brought there.

Real are `dynamo serve` with frontend, router, NATS, mocker processes, `dynamo scale`, HTTP, and the time that passes.
The requests and the measure are those of joining.py. Hits are the router's predictions, which are what engines find;
what a request pulls is in none of them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.generated import client_of
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, Server, running
from benchmarks.routing.joining import FOR_S, FROM_S, NEAR, SETTINGS, WORKERS, Prefixes
from benchmarks.routing.mockers import MAX_IN_FLIGHT, Prompts, start_mockers
from dynamo_local.control.client import ControlClient
from dynamo_local.control.descriptions import RouteLine, RoutesView
from dynamo_local.control.operations import LIST_ROUTES
from dynamo_local.load.session import Generator
from state.paths import StatePaths

_RATE = 12.0
_BEFORE_S, _STARTS_WITHIN_S = 30.0, 15.0
_LOOK_EVERY_S = 2.0
_MOST = 100


@dataclass
class _Seen:
    """Assignments, each with its time (`time.monotonic`)."""

    lines: dict[str, tuple[float, RouteLine]]

    async def look(self, paths: StatePaths) -> None:
        query = {"limit": str(_MOST)}
        answer = await asyncio.to_thread(ControlClient(paths).do, LIST_ROUTES, query=query)
        view = msgspec.convert(answer, RoutesView)
        now = asyncio.get_running_loop().time()
        for line in view.routes:
            self.lines.setdefault(line.request, (now - line.age_s, line))

    def within(self, begin: float, end: float) -> list[RouteLine]:
        return [line for at, line in self.lines.values() if begin <= at < end]


async def measured(quick: bool) -> Figures:
    """Serve, print, and return the figures."""
    found = {share: await _joined(share) for share in ((0.5,) if quick else (0.0, 0.5))}
    rows = [[f"{share:.0%}", *_row(*sides)] for share, sides in found.items()]
    headers = ("brought", "hits of the new", "of the others", "requests to the new", "to the others")
    table(
        f"A worker joins three processes: {FROM_S:g} to {FROM_S + FOR_S:g} s after; aim: {NEAR:g} times", headers, rows
    )
    return {
        f"{share:.0%} brought": {"new": _hits(new), "others": _hits(others)} for share, (new, others) in found.items()
    }


async def _joined(share: float) -> tuple[list[RouteLine], list[RouteLine]]:
    """Assignments to the worker that has joined, and to the others."""
    arrivals = Prefixes(_RATE).arrivals(1, _BEFORE_S + _STARTS_WITHIN_S + FROM_S + FOR_S)
    prompts = Prompts(arrivals, SETTINGS.mocker_block_size)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_mockers(Path(scratch), SETTINGS, WORKERS - 1, most_workers=WORKERS, hot_prefix_share=share)
        async with running(server):
            await server.ready()
            progress(f"ready, {share:.0%} is to be brought")
            async with client_of(server) as client, asyncio.TaskGroup() as group:
                load = group.create_task(Generator(client, prompts, MAX_IN_FLIGHT).open_loop(prompts.planned()))
                seen, joined_at = await _watched(server)
                load.cancel()
    lines = seen.within(joined_at + FROM_S, joined_at + FROM_S + FOR_S)
    new = f"{NAMESPACE}_VllmWorker_{WORKERS - 1}"
    return [each for each in lines if each.worker == new], [each for each in lines if each.worker != new]


async def _watched(server: Server) -> tuple[_Seen, float]:
    """All assignments, and when the worker was ready."""
    assert server.state_root is not None, "ours"
    paths, loop = StatePaths(server.state_root, NAMESPACE), asyncio.get_running_loop()
    await asyncio.sleep(_BEFORE_S)
    await server.dynamo("scale", f"VllmWorker={WORKERS}")
    joined_at, seen = loop.time(), _Seen({})
    while loop.time() < joined_at + FROM_S + FOR_S:
        await asyncio.sleep(_LOOK_EVERY_S)
        await seen.look(paths)
    return seen, joined_at


def _hits(lines: Sequence[RouteLine]) -> float | None:
    tokens = sum(each.tokens for each in lines)
    return sum(each.cached or 0 for each in lines) / tokens if tokens else None


def _row(new: Sequence[RouteLine], others: Sequence[RouteLine]) -> list[str]:
    hits = ["none" if each is None else f"{each:.3f}" for each in (_hits(new), _hits(others))]
    return [*hits, str(len(new)), str(len(others))]
