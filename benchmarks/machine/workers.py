"""How long one more worker takes to start and to end, and what it holds, with and without `kv-transfer`.

Each turn starts a server of its own with one worker, then adds and drains another one, as the planner does. Nothing is
bound to cores, and no request runs: this is what the machinery takes, not the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness.accounting import descendants
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import NAMESPACE, ServerError, running, start_ours
from benchmarks.harness.spread import bootstrap
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import DRAIN_WORKER, SCALE, Operation
from dynamo_local.control.orders import carry_out
from state.paths import StatePaths
from state.statefile.store import StateStore

SUMMARY = "seconds until one more worker is routable and until a drained one has ended, with and without kv-transfer"

_SIDES = {"without": False, "with": True}
_ROWS = {
    "worker_s": "one more worker, s",
    "end_s": "a drained one has ended, s",
    "memory_mib": "memory of its own, MiB",
}
_MIB = 2**10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="servers of each side (5)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    model = str(model_folder(RANDOM))
    found: dict[str, list[Figures]] = {side: [] for side in _SIDES}
    for number in range(arguments.rounds or (1 if arguments.quick else 5)):
        sides = list(_SIDES)
        for side in sides if number % 2 else reversed(sides):
            found[side].append(await _turn(model, kv_transfer=_SIDES[side]))
            progress(f"round {number + 1}, {side}: {found[side][-1]}")
    return _report(found)


async def _turn(model: str, *, kv_transfer: bool) -> Figures:
    settings = {"VllmWorker.kv-transfer": kv_transfer, "VllmWorker.ServiceArgs.workers": 1}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(Path(scratch), model, "agg_router", settings)
        async with running(server):
            await server.ready()
            assert server.state_root is not None
            paths = StatePaths(server.state_root, NAMESPACE)
            watcher, worker_s = await changed(paths, SCALE, {"targets": {"VllmWorker": 2}})
            pid = StateStore(paths).read().components[watcher].pid
            if pid is None:
                raise ServerError("the new worker was gone before it could be looked at")
            memory = sum(private_mib(process.pid) for process in descendants(pid))
            _, end_s = await changed(paths, DRAIN_WORKER, watcher=watcher)
            return {"worker_s": worker_s, "end_s": end_s, "memory_mib": memory}


async def changed(
    paths: StatePaths, operation: Operation, fields: Mapping[str, Any] = MappingProxyType({}), *, watcher: str = ""
) -> tuple[str, float]:
    """Have the server make one change; returns its watcher, and the seconds that it took. Raises ServerError if it was
    not made."""

    def order() -> Any:
        return carry_out(ControlClient(paths), operation, fields, lambda _: None, watcher=watcher)

    (outcome,) = await asyncio.to_thread(order)
    if not outcome["done"]:
        raise ServerError(str(outcome["note"]))
    return str(outcome["watcher"]), float(outcome["took_s"])


def private_mib(pid: int) -> float:
    """Memory that the process shares with no other one, the model's KV cache included."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB$", rollup, re.MULTILINE))) / _MIB


class _Silent:
    """A report to nobody."""

    def step(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def pending(self, text: str) -> None:
        pass


def _report(found: dict[str, list[Figures]]) -> Figures:
    def interval(rounds: Sequence[Figures], key: str) -> str:
        return bootstrap([figures[key] for figures in rounds]).shown(2 if key.endswith("_s") else 0)

    rows = [[name, *(interval(rounds, key) for rounds in found.values())] for key, name in _ROWS.items()]
    table("One more worker", ("", *(f"{side} kv-transfer" for side in found)), rows)
    return {"rounds": found}
