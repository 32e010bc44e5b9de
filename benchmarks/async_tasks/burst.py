"""A burst of asynchronous tasks for an endpoint at zero: how long until it is drained, against one that is always on.

Real are `dynamo serve -f`, its frontend, router, planner and controller, and every worker process; the engines are
mockers that run `PER_WORKER` requests at once. Turns at zero and always on alternate; each has a server of its own. A
burst at zero comes when the endpoint sleeps. One start is measured likewise: a single task for the endpoint at zero,
less the time of one on an endpoint that is on.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.endpoints.mockers import all_ready, mocker, until
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, Server, ServerError, running, start_endpoints
from benchmarks.harness.spread import median
from state.async_tasks.store import TaskStore
from state.paths import StatePaths

SUMMARY = "a burst of asynchronous tasks for an endpoint at zero: seconds until drained, against always on"

NAME = "chat"
PER_WORKER = 8
_WORKERS, _TASKS = 4, 320
_TOKENS = 100
_WITHIN_S = 240.0
_LOOK_S = 0.1
_ARGS: Mapping[str, Any] = {
    "mocker-step-base-ms": 20.0,
    "mocker-max-num-seqs": PER_WORKER,
    "mocker-start-s": 1.3,
}
"""As in the benchmark `endpoints`: a worker is ready after 1.8 s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="turns at zero and always on (2)")
    parser.add_argument("--tasks", type=int, help=f"of a burst ({_TASKS})")
    parser.add_argument("--workers", type=int, default=_WORKERS, help=f"of the endpoint, at most ({_WORKERS})")


@dataclass(frozen=True)
class Turn:
    """A burst. `single_s`: time of a single task before it; `drained_s`: until the last result of the burst is on the
    disk. `failed`: tasks without success. `orders`: (seconds after the burst's beginning, workers ordered)."""

    from_zero: bool
    single_s: float
    drained_s: float
    failed: int
    orders: tuple[tuple[float, int], ...]


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 2)
    tasks, workers = arguments.tasks or (_TASKS // 4 if arguments.quick else _TASKS), arguments.workers
    turns: list[Turn] = []
    for number in range(rounds):
        # ABBA: whatever drifts favours neither.
        for from_zero in (True, False) if number % 2 == 0 else (False, True):
            turns.append(await _turn(tasks, workers, from_zero=from_zero))
            progress(f"{'from zero' if from_zero else 'always on'}: drained after {turns[-1].drained_s:.1f} s")
    _show(turns, tasks, workers)
    return {"tasks": tasks, "workers": workers, "turns": [asdict(turn) for turn in turns]}


async def _turn(tasks: int, workers: int, *, from_zero: bool) -> Turn:
    least = 0 if from_zero else workers
    spec = mocker(NAME, _ARGS, min_workers=least, max_workers=workers, requests_per_worker=PER_WORKER)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [spec], (f"--cpu-slots={workers}",))
        async with running(server):
            await until(server, "asleep" if from_zero else "ready")
            if not from_zero:
                await all_ready(server, [spec])
            store = _Tasks(server)
            await store.are_taken()
            if from_zero:
                await _sleep(server)
            single_s = await store.burst(1)
            if from_zero:
                await _sleep(server)
            began = time.monotonic()
            drained_s = await store.burst(tasks)
            return Turn(from_zero, single_s, drained_s, store.failed(), _orders(server, began))


class _Tasks:
    """Orders tasks, and follows them in the store, which costs the frontend nothing."""

    def __init__(self, server: Server) -> None:
        assert server.state_root is not None
        self._server = server
        self._paths = StatePaths(server.state_root, NAMESPACE)
        self._store = TaskStore(self._paths)

    async def are_taken(self) -> None:
        """Wait until tasks are taken: an endpoint may sleep before the API answers."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            try:
                await self._order(1)
                break
            except ServerError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)
        while not self._ended():
            if time.monotonic() > deadline:
                raise ServerError(f"the first task has not ended after {_WITHIN_S:g} s")
            await asyncio.sleep(_LOOK_S)

    async def burst(self, number: int) -> float:
        """Order so many tasks at once. Returns the seconds until all have ended."""
        began, before = time.monotonic(), self._ended()
        await self._order(number)
        while self._ended() < before + number:
            if time.monotonic() - began > _WITHIN_S:
                raise ServerError(f"{self._ended() - before} of {number} tasks have ended after {_WITHIN_S:g} s")
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began

    def failed(self) -> int:
        return sum(self._store.find(*each).status != "SUCCESS" for each in self._store.all())

    def _ended(self) -> int:
        return sum(1 for _ in self._paths.tasks_dir.glob("*/*.ended"))

    async def _order(self, number: int) -> None:
        """Order tasks, one after the other. Each answer says that a task is on the disk."""
        for index in range(number):
            args = {"prompt": f"task {index}", "max_tokens": _TOKENS, "ignore_eos": True}
            await self._server.post(f"/v1/async-tasks?model_endpoint_id={NAME}", {"args": args})


async def _sleep(server: Server) -> None:
    await server.dynamo("scale", f"{NAME}=0")
    await until(server, "asleep")


def _orders(server: Server, began: float) -> tuple[tuple[float, int], ...]:
    """What the planner ordered since `began` (CLOCK_MONOTONIC, s)."""
    assert server.state_root is not None
    path = StatePaths(server.state_root, NAMESPACE).decisions_file
    decisions = map(msgspec.json.decode, path.read_bytes().splitlines() if path.exists() else [])
    return tuple(
        (round(each["at"] - began, 1), each["order"]["workers"])
        for each in decisions
        if each.get("endpoint") == NAME and each.get("order") is not None and each["at"] >= began
    )


def _show(turns: list[Turn], tasks: int, workers: int) -> None:
    zero, on = ([turn for turn in turns if turn.from_zero is kind] for kind in (True, False))
    start_s = median([each.single_s for each in zero]) - median([each.single_s for each in on])
    aim_s = 1.2 * median([each.drained_s for each in on]) + start_s
    rows = [
        [
            name,
            f"{median([each.drained_s for each in mine]):.1f}",
            ", ".join(f"{each.drained_s:.1f}" for each in mine),
            f"{median([each.single_s for each in mine]):.2f}",
            str(sum(each.failed for each in mine)),
            "; ".join(f"{at:.1f} s: {number}" for at, number in mine[0].orders),
        ]
        for name, mine in (("from zero", zero), ("always on", on))
    ]
    table(
        f"{tasks} tasks of {_TOKENS} tokens, at most {workers} workers of {PER_WORKER} requests; one start "
        f"{start_s:.1f} s; the aim, 1.2 times always on and one start: {aim_s:.1f} s",
        ["", "drained after, s", "by turn", "a single task, s", "failed", "ordered in the first turn"],
        rows,
    )
