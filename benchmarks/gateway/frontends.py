"""Two frontends on one port against one: what a token costs, and what the death of one costs.

Both servers are there at the same time, with mockers that take 30 ms for a step, and are asked in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import add, is_alive
from benchmarks.harness.client import Completion
from benchmarks.harness.load import Load, Shape, client_of, closed_loop
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import Server, ServerError, running, start_ours
from benchmarks.harness.spread import median, quantile

SUMMARY = "two frontends on one port against one: CPU a token, and what the death of one costs"

_STREAMS = 48
_SHAPE = Shape(min_tokens=32, max_tokens=96)
_KILL_STREAMS, _KILL_TOKENS = 24, 150
_BACK_WITHIN_S = 60.0
_LOOK_S = 0.01

_MOCKER: Mapping[str, Any] = {
    "VllmWorker.engine": "mocker",
    # The tokenizer's printable tokens: half a character would be held back until the other half comes.
    "VllmWorker.mocker-vocab-size": 127,
    "VllmWorker.mocker-kv-blocks": 16384,
    "VllmWorker.mocker-max-num-seqs": 512,
    "VllmWorker.mocker-step-base-ms": 30,
    "VllmWorker.mocker-prefill-us-per-token": 0,
    "VllmWorker.mocker-decode-us-per-seq": 0,
}
_ROLES = ("frontend", "router", "worker host", "nats", "dynamo serve", "client")


@dataclass
class Kill:
    """What the death of one frontend did. Times in s, from the signal to a whole answer on a new connection."""

    had: int = 0
    lost: int = 0
    lost_of_others: int = 0
    wrong: int = 0
    first_s: float = 0.0
    next_s: list[float] = field(default_factory=list)
    back_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="turns of each server (6), and kills (6)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a turn")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 6)
    model = str(model_folder(RANDOM))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folders = [Path(scratch) / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        one, two = (
            start_ours(folder, model, "agg_router", {**_MOCKER, "Frontend.ServiceArgs.workers": number})
            for number, folder in enumerate(folders, 1)
        )
        async with running(one, two):
            await asyncio.gather(one.ready(), two.ready())
            await _until_frontends(two, 2)
            loads = await _turns([one, two], rounds, arguments.seconds)
            kills = [await _kill(two, number) for number in range(rounds)]
    costs = [_cost(number, turns) for number, turns in enumerate(loads, 1)]
    _show(costs, kills)
    return {"costs": costs, "kills": [vars(kill) for kill in kills]}


async def _turns(servers: Sequence[Server], rounds: int, seconds: float) -> list[list[Load]]:
    turns: list[list[Load]] = [[] for _ in servers]
    for server in servers:
        await closed_loop(server, streams=8, seconds=2, seed=-1, shape=Shape())
    for number in range(rounds):
        order = list(zip(servers, turns, strict=True))
        for server, mine in order if number % 2 == 0 else reversed(order):
            load = await closed_loop(server, streams=_STREAMS, seconds=seconds, seed=number, shape=_SHAPE)
            mine.append(load)
            progress(f"round {number + 1}: {load.tokens_per_s:.0f} tokens/s, {len(load.failures)} failed")
    return turns


def _cost(frontends: int, loads: Sequence[Load]) -> Figures:
    used, tokens = add(load.used for load in loads), sum(load.tokens for load in loads)
    return {
        "frontends": frontends,
        "tokens_per_s": median([load.tokens_per_s for load in loads]),
        "cpu_us_per_token": {role: 1e6 * spent / tokens for role, spent in used.roles.items()},
        "foreign_cores": used.foreign_cores,
        "failures": [why for load in loads for why in load.failures],
    }


async def _kill(server: Server, number: int) -> Kill:
    """Kill the frontend that has most of the streams under way."""
    asked = [_Asked(f"kill {number} stream {index}") for index in range(_KILL_STREAMS)]
    tasks = [asyncio.create_task(each.ask(server)) for each in asked]
    while not all(each.answer.chunks_s or each.answer.failure for each in asked):  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(_LOOK_S)
    owners = {row["request"]: row["frontend"] for row in (await server.dynamo("requests"))["requests"]}
    of_stream = [owners.get(each.answer.request_id, "") for each in asked]
    victim = Counter(of_stream).most_common(1)[0][0]
    kill = Kill(had=of_stream.count(victim))
    pid = {row["watcher"]: row["pid"] for row in await server.dynamo("ps")}[victim]
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for _ in range(10):
        began = time.monotonic()
        await server.get("/v1/models")
        kill.next_s.append(time.monotonic() - (began if kill.next_s else killed_at))
    kill.first_s = kill.next_s.pop(0)
    # Before answers are compared: that takes longer the more of them have survived.
    await _until_frontends(server, 2, without=pid)
    kill.back_s = time.monotonic() - killed_at
    await asyncio.gather(*tasks)
    for each, owner in zip(asked, of_stream, strict=True):
        lost = bool(each.answer.failure)
        kill.lost += lost
        kill.lost_of_others += lost and owner != victim
        # The mocker's tokens depend on the context alone.
        kill.wrong += not lost and each.answer.token_ids != (await _Asked(each.prompt).ask(server)).token_ids
    progress(f"kill {number + 1}: {vars(kill)}")
    return kill


@dataclass
class _Asked:
    """A request, on a connection of its own, so that both frontends have some."""

    prompt: str
    answer: Completion = field(default_factory=Completion)

    async def ask(self, server: Server) -> Completion:
        async with client_of(server, return_token_ids=True) as client:
            return await client.complete(self.prompt, _KILL_TOKENS, self.answer)


async def _until_frontends(server: Server, number: int, without: int | None = None) -> None:
    """Wait until that many are ready, none of them the process `without`."""
    deadline = time.monotonic() + _BACK_WITHIN_S
    while time.monotonic() < deadline:
        rows = await server.dynamo("ps")
        ready = [row["pid"] for row in rows if row["role"] == "frontend" and row["state"] == "ready"]
        if len(ready) == number and without not in ready:
            server.refresh()
            assert all(is_alive(process) for process in server.of_role("frontend"))
            return
    raise ServerError(f"there are no {number} frontends after {_BACK_WITHIN_S:g} s")


def _show(costs: Sequence[Figures], kills: Sequence[Kill]) -> None:
    rows = [
        [
            str(cost["frontends"]),
            f"{cost['tokens_per_s']:.0f}",
            *(f"{cost['cpu_us_per_token'].get(role, 0):.1f}" for role in _ROLES),
            f"{sum(cost['cpu_us_per_token'].values()):.1f}",
            str(len(cost["failures"])),
        ]
        for cost in costs
    ]
    headers = ("frontends", "tokens/s", *(f"{role}, us/token" for role in _ROLES), "all, us/token", "failed")
    table(f"{_STREAMS} streams, a step every 30 ms", headers, rows)
    nexts = [second for kill in kills for second in kill.next_s]
    firsts = [kill.first_s for kill in kills]
    figures = [
        str(len(kills)),
        f"{sum(kill.lost for kill in kills)} of {sum(kill.had for kill in kills)}",
        f"{sum(kill.lost_of_others for kill in kills)} of {sum(_KILL_STREAMS - kill.had for kill in kills)}",
        str(sum(kill.wrong for kill in kills)),
        f"{1e3 * median(firsts):.1f} / {1e3 * max(firsts):.1f}",
        f"{1e3 * median(nexts):.1f} / {1e3 * quantile(nexts, 0.99):.1f}",
        f"{median([kill.back_s for kill in kills]):.1f}",
    ]
    headers = (
        "kills",
        "requests lost of those of the dead one",
        "of the others",
        "answers not exact",
        "first answer after the kill, ms p50 / max",
        "the next, ms p50 / p99",
        "two frontends again after, s",
    )
    table("One of two frontends is killed", headers, [figures])
