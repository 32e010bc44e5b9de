"""Seconds for a request beside somebody else's busy loop: vLLM's own server and ours, side by side, in turns.

Ours binds its engine to a core while it has that to itself. What that is worth is shown beside: the same engine free to
use every core ("ours, unbound"). Whichever server is not asked is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from benchmarks.harness.accounting import Process
from benchmarks.harness.calm import Patience
from benchmarks.harness.load import client_of
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import Server, ServerError, running, start_ours, start_vllm
from benchmarks.harness.spread import median
from state.machine.threads import bind_thread, cores_of, threads_of

SUMMARY = "seconds for a request beside busy loops of somebody else, and what binding an engine to its core is worth"
_ROUNDS = 4
_ASKED = 5
"""Requests of a side in a row."""
_TOKENS = 120
_SETTLE_S = 2.0
_PATIENCE_S = 60.0
_LOOP = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"

VLLM, OURS, UNBOUND = "vLLM", "ours", "ours, unbound"

Seconds = dict[str, dict[str, list[float]]]
"""By case, then by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns of each case ({_ROUNDS})")
    parser.add_argument("--model", choices=MODELS, default=RANDOM)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    asked, first = Seconds(), Seconds()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        async with _both(Path(scratch), str(model_folder(arguments.model))) as (vllm, ours):
            slot = _slot_of(ours)
            cases = _cases(slot)
            for number in range(rounds):
                for case, loops in cases.items():
                    await patience.wait((*vllm.processes, *ours.processes))
                    with _busy(loops):
                        await asyncio.sleep(_SETTLE_S)
                        await _turn(case, (vllm, ours), asked, first, backwards=number % 2 == 1)
                    told = ", ".join(f"{side} {median(them):.2f} s" for side, them in asked[case].items())
                    progress(f"round {number + 1}, {case}: {told}")
    return _report(asked, first)


@asynccontextmanager
async def _both(folder: Path, model: str) -> AsyncIterator[tuple[Server, Server]]:
    """Start the servers one after the other, as each wants the machine while it starts."""
    ours = start_ours(folder, model, "agg", {})
    async with running(ours):
        await ours.ready()
        vllm = start_vllm(folder, model)
        async with running(vllm):
            await vllm.ready()
            for server in (vllm, ours):
                await _ask(server)
            yield vllm, ours


def _slot_of(ours: Server) -> frozenset[int]:
    for process in ours.of_role("worker host"):
        for setting in Path(f"/proc/{process.pid}/environ").read_text().split("\0"):
            if setting.startswith("DYN_CPU_CORES="):
                return frozenset(int(core) for core in setting.partition("=")[2].split(","))
    raise ServerError("the worker has no cores of its own: this is about CPU slots")


def _cases(slot: frozenset[int]) -> Mapping[str, Sequence[int]]:
    """By what it is called: the cores on which somebody else computes."""
    everywhere = os.sched_getaffinity(0)
    beside = sorted(everywhere - slot)[:1]
    elsewhere = {"on another core": beside, "on every core": sorted(everywhere)} if beside else {}
    return {"quiet": (), "on the engine's core": sorted(slot), **elsewhere}


@contextmanager
def _busy(cores: Sequence[int]) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP, str(core)]) for core in cores]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def _turn(case: str, servers: tuple[Server, Server], asked: Seconds, first: Seconds, *, backwards: bool) -> None:
    vllm, ours = servers
    for side in (OURS, VLLM, UNBOUND) if not backwards else (UNBOUND, VLLM, OURS):
        with _free(ours) if side == UNBOUND else _as_it_is():
            seconds = [await _ask(vllm if side == VLLM else ours) for _ in range(_ASKED)]
        first.setdefault(case, defaultdict(list))[side].append(seconds[0])
        asked.setdefault(case, defaultdict(list))[side] += seconds


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _free(ours: Server) -> Iterator[None]:
    """Its engine on any core. It leaves threads alone that have been bound by others."""
    engine: tuple[Process, ...] = (*ours.of_role("EngineCore"), *ours.of_role("Worker"))
    had = {thread: cores_of(thread) for process in engine for thread in threads_of(process.pid)}
    for thread in had:
        bind_thread(thread, os.sched_getaffinity(0))
    try:
        yield
    finally:
        for thread, cores in had.items():
            bind_thread(thread, cores)


async def _ask(server: Server) -> float:
    """Returns its seconds."""
    async with client_of(server) as client:
        answer = await client.complete("hello there", _TOKENS)
    if answer.e2e_s is None or answer.failure:
        raise ServerError(f"{server.name}: {answer.failure}")
    return answer.e2e_s


def _report(asked: Seconds, first: Seconds) -> Figures:
    rows = []
    figures: Figures = {}
    for case, sides in asked.items():
        seconds = {side: median(them) for side, them in sides.items()}
        firsts = {side: median(them) for side, them in first[case].items()}
        figures[case] = {"seconds": dict(sides), "median_s": seconds, "first_s": firsts}
        told = (f"{seconds[side]:.2f} ({firsts[side]:.2f})" for side in (VLLM, OURS, UNBOUND))
        rows.append((case, *told, f"{seconds[OURS] / seconds[VLLM]:.2f}", f"{seconds[UNBOUND] / seconds[OURS]:.2f}"))
    table(
        f"Seconds for {_TOKENS} tokens beside a busy loop (the first request of a turn)",
        ("busy loop", VLLM, OURS, UNBOUND, "ours to vLLM", "unbound to ours"),
        rows,
    )
    return figures
