"""What a worker gives back when it is parked, how soon it answers again, and that many turns leave nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.endpoints.cost import pss_mib
from benchmarks.harness.accounting import Process, descendants
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import (
    NAMESPACE,
    Server,
    ServerError,
    add_override,
    parse_overrides,
    running,
    start_ours,
)
from benchmarks.machine.thread_times import read_threads
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.paths import StatePaths

SUMMARY = "memory and CPU of a parked worker, time until it answers again, and what many turns leave"
_ORDER_S = 120.0
_PROMPT_TOKENS = 900
_FILLING = 8
"""Prompts before each parking: they touch most of a small KV cache."""


@dataclass(frozen=True)
class Turn:
    """A turn of parking and waking. MiB are of the worker's processes together, in parts where they share pages."""

    park_s: float
    answer_s: float
    """From the order to wake to the first token."""
    used_mib: float
    parked_mib: float
    files: int
    processes: int
    same: bool
    """Whether the answer was that of the first turn."""


class _Worker:
    """The only worker of a server, by its orders on the bus."""

    def __init__(self, server: Server, bus: Bus, lease: str, pid: int) -> None:
        self._server = server
        self._bus = bus
        self._subject = Subjects(NAMESPACE, FIRST_OF_MAIN).parking(lease)
        self._pid = pid

    @property
    def processes(self) -> tuple[Process, ...]:
        return descendants(self._pid)

    async def order(self, *, parked: bool) -> float:
        """Returns how long it took. Raises ServerError if the worker refuses."""
        began = time.monotonic()
        while True:
            answer = await self._bus.ask(self._subject, ParkQuestion(parked), ParkAnswer, timeout_s=_ORDER_S)
            if answer.parked == parked:
                return time.monotonic() - began
            # The end of a request is heard by its client before the worker hears of it.
            if time.monotonic() - began > _ORDER_S:
                raise ServerError(f"the worker does not park: {answer.refused}")
            began = time.monotonic()

    async def complete(self, prompt: list[int], tokens: int) -> bytes:
        """The text that a prompt is continued with."""
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = await self._server.post("/v1/completions", body)
        return msgspec.json.encode(answer["choices"][0]["text"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, help="how often to park and wake (50)")
    parser.add_argument("--seconds", type=float, help="how long to measure the CPU time of the parked worker (20)")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    turns = arguments.turns or (3 if arguments.quick else 50)
    seconds = arguments.seconds or (3.0 if arguments.quick else 20.0)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = str(model_folder(RANDOM))
        server = start_ours(Path(scratch), folder, "agg", parse_overrides(arguments.override))
        async with running(server), PresenceLog(server) as presences:
            await server.ready()
            presence = await presences.ready_worker()
            assert server.state_root is not None
            bus = await Bus.connect(BusAddress.load(StatePaths(server.state_root, NAMESPACE).bus_file), name="parking")
            try:
                worker = _Worker(server, bus, presence.lease, presence.pid)
                taken, cpu = await _measure(worker, turns, seconds)
            finally:
                await bus.close()
    return _report(taken, cpu, seconds)


async def _measure(worker: _Worker, turns: int, seconds: float) -> tuple[list[Turn], dict[str, float]]:
    draw = random.Random(1)
    question = [draw.randrange(256) for _ in range(100)]
    right = await worker.complete(question, 16)
    taken: list[Turn] = []
    cpu: dict[str, float] = {}
    for number in range(turns):
        for _ in range(_FILLING):
            await worker.complete([draw.randrange(256) for _ in range(_PROMPT_TOKENS)], 1)
        used = _mib(worker.processes)
        park_s = await worker.order(parked=True)
        parked, files = _mib(worker.processes), _files(worker.processes)
        if number == turns - 1:
            cpu = await _cpu(worker.processes, seconds)
        began = time.monotonic()
        await worker.order(parked=False)
        await worker.complete(question[:50], 1)
        answer_s = time.monotonic() - began
        same = await worker.complete(question, 16) == right
        taken.append(Turn(park_s, answer_s, used, parked, files, len(worker.processes), same))
        progress(
            f"turn {number + 1}: {used:.0f} MiB, parked {parked:.0f} MiB, answer after {milliseconds(answer_s)} ms"
        )
    return taken, cpu


async def _cpu(processes: Iterable[Process], seconds: float) -> dict[str, float]:
    """CPU time in ms/s, by process."""
    before = read_threads(process.pid for process in processes)
    await asyncio.sleep(seconds)
    after = read_threads(process.pid for process in processes)
    spent: dict[str, float] = {}
    for key, now in after.items():
        name = (Path("/proc") / str(key.pid) / "comm").read_text().strip()
        spent.setdefault(name, 0.0)
        if key in before:
            spent[name] += (now.cpu_ns - before[key].cpu_ns) / (now.at - before[key].at) / 1e6
    return spent


def _mib(processes: Iterable[Process]) -> float:
    return sum(pss_mib(process.pid) for process in processes)


def _files(processes: Iterable[Process]) -> int:
    return sum(sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir()) for process in processes)


def _report(turns: list[Turn], cpu: dict[str, float], seconds: float) -> Figures:
    answers = sorted(turn.answer_s for turn in turns)
    first, last = turns[0], turns[-1]
    table(
        f"Parking, {len(turns)} turns",
        ("", "first turn", "last turn"),
        [
            ["MiB after prompts", f"{first.used_mib:.0f}", f"{last.used_mib:.0f}"],
            ["MiB parked", f"{first.parked_mib:.0f}", f"{last.parked_mib:.0f}"],
            ["open files", str(first.files), str(last.files)],
            ["processes", str(first.processes), str(last.processes)],
        ],
    )
    wrong = sum(not turn.same for turn in turns)
    print(
        f"parked within {milliseconds(median(turn.park_s for turn in turns))} ms, woken and answered within "
        f"{milliseconds(median(answers))} ms (most: {milliseconds(answers[-1])} ms); other answers: {wrong}"
    )
    table(f"CPU of the parked worker, {seconds:g} s", ("process", "ms/s"), [[n, f"{ms:.2f}"] for n, ms in cpu.items()])
    return {
        "turns": [msgspec.to_builtins(turn) for turn in turns],
        "answer_median_s": median(answers),
        "answer_most_s": answers[-1],
        "wrong": wrong,
        "cpu_ms_per_s": cpu,
    }
