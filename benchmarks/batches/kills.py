"""Background answers and lines of batches, or asynchronous tasks, under kill -9 of workers, frontend, NATS and `dynamo
serve`.

Half of the requests are answers in the background, half are lines of two batches; or all are tasks. They are asked for
by openai's client, and compared with what the undisturbed server has answered. Every few seconds one of the processes
is killed, in turn, until all is done; after that of `dynamo serve` a new one is started, which nobody tells what was
under way. With another revision beside, each of the two has as many requests, in two turns, each with a new server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.batches.client import BATCHES, MODEL, PROMPTS, PatientClient, Tally
from benchmarks.batches.tasks import TaskWork
from benchmarks.batches.work import Work
from benchmarks.endpoints.mockers import all_ready, mocker
from benchmarks.faults.parts import Parts
from benchmarks.harness.client import HOST
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress, save, table
from benchmarks.harness.servers import (
    BESIDE,
    OURS,
    SMALL_ENGINE,
    Server,
    ServerError,
    add_beside,
    in_turn,
    running,
    serve_again,
    sides_of,
    start_endpoints,
)

SUMMARY = "10,000 answers and lines of batches, or tasks, under kills of every process: has each one right result?"

_PARTS = ("host", "frontend", "nats", "serve")
_REQUESTS, _QUICK_REQUESTS = 10_000, 400
_EVERY_S = 15.0
_AT_ONCE = 48
_TOKENS = 24
_GOES_ON_WITHIN_S = 300.0
_LOOK_EVERY_S = 0.1
_OPTIONS = ("--cpu-slots=4",)
_VLLM_ARGS: dict[str, Any] = {**SMALL_ENGINE, "max-model-len": 1024}


@dataclass(frozen=True)
class Kill:
    """A kill. `at`: requests that were done by then. `goes_on_s`: until the next one was done."""

    part: str
    at: int
    goes_on_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("mocker", "vllm"), default="mocker")
    parser.add_argument("--tasks", action="store_true", help="asynchronous tasks instead of answers and lines")
    parser.add_argument("--requests", type=int, help=f"all together ({_REQUESTS})")
    parser.add_argument("--every", type=float, default=_EVERY_S, help="seconds between a kill and the next")
    parser.add_argument("--tokens", type=int, default=_TOKENS, help="of each answer")
    add_beside(parser)


@dataclass
class _Side:
    """A revision, and what was found with it, over all of its turns."""

    checkout: Path
    requests: int = 0
    tallies: list[Tally] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> Figures:
        counts = ("answers", "lines", "tasks")
        return {
            "requests": self.requests,
            "right": {key: sum(getattr(tally, key) for tally in self.tallies) for key in counts},
            "faults": dict(sum((tally.faults for tally in self.tallies), Counter[str]())),
            "unconfirmed": sum(tally.unconfirmed for tally in self.tallies),
            "seconds": self.seconds,
            "kills": [asdict(kill) for kill in self.kills],
        }


async def run(arguments: argparse.Namespace) -> Figures:
    """Kill until all is done, print, and return the figures. They are saved after each kill."""
    sides = {name: _Side(checkout) for name, checkout in sides_of(arguments).items()}
    number = arguments.requests or (_QUICK_REQUESTS if arguments.quick else _REQUESTS)

    def keep() -> None:
        save(arguments.json, "batch-kills", _flat(sides))

    for turn in range(len(sides)):
        for side in in_turn(sides.values(), turn):
            await _turn(side, number // len(sides), arguments, keep)
    for name, side in sides.items():
        _show(name, side.figures())
    if BESIDE in sides:
        compare("killed", {"goes_on_s": "next result"}, *(_by_part(sides[name]) for name in (OURS, BESIDE)))
    return _flat(sides)


async def _turn(side: _Side, number: int, arguments: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Have so many requests answered by a server of that side. `keep`: called after each kill."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        specs = _specs(arguments.engine)
        server = start_endpoints(Path(scratch), specs, _OPTIONS, side.checkout)
        async with running(server):
            await all_ready(server, specs)
            work = (TaskWork if arguments.tasks else Work)(f"http://{HOST}:{server.port}", arguments.tokens)
            await work.learn()
            progress(f"{server.name}: {PROMPTS} prompts have one answer from each API")
            side.tallies.append(work.tally)
            begun = time.monotonic()
            async with asyncio.TaskGroup() as group:
                done = group.create_task(_all(work, number, server), name="requests")
                killer = group.create_task(_kill_until(done, work, server, arguments.every, side.kills, keep))
                await asyncio.wait({done})
                killer.cancel()
            side.requests += number
            side.seconds += time.monotonic() - begun
            await work.close()


def _specs(engine: str) -> list[dict[str, Any]]:
    spec = mocker(MODEL, {"max-model-len": 1024, "mocker-step-base-ms": 10}, min_workers=2, max_workers=2)
    return [
        spec
        if engine == "mocker"
        else {**spec, "engine": "vllm", "model": str(model_folder(RANDOM)), "args": _VLLM_ARGS}
    ]


async def _all(work: PatientClient, number: int, server: Server) -> None:
    if isinstance(work, TaskWork):
        await work.run(number, _AT_ONCE)
        await work.left(server)
        return
    assert isinstance(work, Work)
    lines = number // 2 // len(BATCHES)
    async with asyncio.TaskGroup() as group:
        for api in BATCHES:
            group.create_task(work.batch(api, lines))
        group.create_task(work.answers(number - lines * len(BATCHES), _AT_ONCE))


async def _kill_until(
    done: asyncio.Task[None],
    work: PatientClient,
    server: Server,
    every_s: float,
    kills: list[Kill],
    keep: Callable[[], None],
) -> None:
    """Kill a process of each part in turn, each once requests have been done since the kill before. `keep`: called
    after each."""
    for turn, part in enumerate(itertools.cycle(_PARTS)):
        await asyncio.wait({done}, timeout=every_s)
        if done.done():
            return
        found = Parts(server).processes().get(part, ())
        if not found:
            progress(f"no {part} to be killed")
            continue
        before, at = work.tally.done, time.monotonic()
        os.kill(found[turn % len(found)].pid, signal.SIGKILL)
        if part == "serve":
            await serve_again(server, _OPTIONS)
            # What the old one's processes did before they ended counts as before.
            before = work.tally.done
        await _goes_on(done, work, server, before)
        kills.append(Kill(part, before, round(time.monotonic() - at, 1)))
        progress(f"{part} killed at {before}, goes on after {kills[-1].goes_on_s} s; faults: {dict(work.tally.faults)}")
        keep()


async def _goes_on(done: asyncio.Task[None], work: PatientClient, server: Server, before: int) -> None:
    """Wait until another request is done. Raises ServerError if none is in time, or the server has ended."""
    deadline = time.monotonic() + _GOES_ON_WITHIN_S
    while work.tally.done <= before and not done.done():
        if server.ended or time.monotonic() > deadline:
            raise ServerError(f"nothing goes on:\n{server.last_lines()}")
        await asyncio.sleep(_LOOK_EVERY_S)


def _flat(sides: Mapping[str, _Side]) -> Figures:
    """The figures of this revision, with those of the one beside."""
    return sides[OURS].figures() | {name: side.figures() for name, side in sides.items() if name != OURS}


def _by_part(side: _Side) -> dict[str, list[Figures]]:
    parts = {part: [asdict(kill) for kill in side.kills if kill.part == part] for part in _PARTS}
    return {"all requests": [{"goes_on_s": side.seconds}], **parts}


def _show(name: str, figures: Figures) -> None:
    right, faults = figures["right"], figures["faults"]
    cells = (
        str(figures["requests"]),
        str(right["answers"]),
        str(right["lines"]),
        str(right["tasks"]),
        str(sum(faults.values())),
        str(figures["unconfirmed"]),
        f"{figures['seconds']:.0f}",
    )
    head = ("asked", "right answers", "right lines", "right tasks", "faults", "creations cut off", "seconds")
    table(f"Requests, {name}", head, [cells])
    for fault, count in faults.items():
        print(f"{count} times: {fault}")
    rows = []
    for part in _PARTS:
        times = [kill["goes_on_s"] for kill in figures["kills"] if kill["part"] == part]
        rows.append((part, str(len(times)), f"{max(times):.1f}" if times else "-"))
    table(f"Kills, {name}", ("killed", "times", "longest until the next result, s"), rows)
