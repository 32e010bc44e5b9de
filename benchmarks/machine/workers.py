"""How long one more worker takes to start and to end, and what it holds, with and without `kv-transfer`.

Each turn starts a server of its own with one worker, then adds and drains another one, as the planner does; with
another revision beside, both in turn. Nothing is bound to cores, and no request runs: this is what the machinery takes,
not the streams.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.accounting import cpu_s, descendants
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress, table
from benchmarks.harness.servers import BESIDE, OURS, Server, add_beside, in_turn, running, sides_of, start_ours
from benchmarks.harness.spread import bootstrap

SUMMARY = "seconds until one more worker is routable and until a drained one has ended, with and without kv-transfer"

_KV_TRANSFER = {"without": False, "with": True}
_ROWS = {
    "worker_s": "one more worker, s",
    "end_s": "a drained one has ended, s",
    "memory_mib": "memory of its own, MiB",
}
_MIB = 2**10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="servers of each side (5)")
    add_beside(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    sides = sides_of(arguments)
    found: dict[str, dict[str, list[Figures]]] = {name: {kind: [] for kind in _KV_TRANSFER} for name in sides}
    for number in range(arguments.rounds or (1 if arguments.quick else 5)):
        for kind in in_turn(_KV_TRANSFER, number):
            for name in in_turn(sides, number):
                found[name][kind].append(await _turn(sides[name], kv_transfer=_KV_TRANSFER[kind]))
                progress(f"round {number + 1}, {name}, {kind}: {found[name][kind][-1]}")
    return _report(found)


async def _turn(checkout: Path, *, kv_transfer: bool) -> Figures:
    settings = {"VllmWorker.kv-transfer": kv_transfer, "VllmWorker.ServiceArgs.workers": 1}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), str(model_folder(RANDOM)), "agg_router", settings, checkout=checkout)
        async with running(server):
            await server.ready()
            added = await one_more(server)
            ended = await server.dynamo("drain", added.watcher)
            return {"worker_s": added.took_s, "end_s": ended["took_s"], "memory_mib": added.memory_mib}


@dataclass(frozen=True)
class Added:
    """A worker that was added: how long that took, the CPU time that it needed for it, and the memory that it shares
    with no other process."""

    watcher: str
    took_s: float
    cpu_s: float
    memory_mib: float


async def one_more(server: Server, workers: int = 2) -> Added:
    """Add a worker, so that there are so many."""
    (added,) = await server.dynamo("scale", f"VllmWorker={workers}")
    (pid,) = [row["pid"] for row in await server.dynamo("ps") if row["watcher"] == added["watcher"]]
    memory = sum(_private_mib(process.pid) for process in descendants(pid))
    return Added(added["watcher"], added["took_s"], cpu_s(pid), memory)


def _private_mib(pid: int) -> float:
    """Memory that the process shares with no other one, the model's KV cache included."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB$", rollup, re.MULTILINE))) / _MIB


def _report(found: dict[str, dict[str, list[Figures]]]) -> Figures:
    headers = ("", *(f"{kind} kv-transfer" for kind in _KV_TRANSFER))
    for name, kinds in found.items():
        rows = [[title, *(_interval(rounds, key) for rounds in kinds.values())] for key, title in _ROWS.items()]
        table(f"One more worker, {name}", headers, rows)
    if BESIDE in found:
        compare("kv-transfer", _ROWS, found[OURS], found[BESIDE])
    return {"rounds" if name == OURS else name: kinds for name, kinds in found.items()}


def _interval(rounds: Sequence[Figures], key: str) -> str:
    return bootstrap([figures[key] for figures in rounds]).shown(2 if key.endswith("_s") else 0)
