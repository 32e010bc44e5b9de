"""What many endpoints cost: memory of the frontend, and the seconds until all of them answer.

Servers with one endpoint and with many take turns. All endpoints have one mocker and one model, whose tokenizer every
application of the frontend loads for itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.endpoints.mockers import all_ready, mocker
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import running, start_endpoints
from benchmarks.harness.spread import median


class Cost(msgspec.Struct, frozen=True):
    """A server's start. `frontend_mib`: proportional set size of the frontend once all endpoints are ready."""

    endpoints: int
    round: int
    ready_s: float
    frontend_mib: float
    workers_mib: float


async def measure(rounds: int, many: int) -> Figures:
    """Measure, print, and return the figures."""
    costs = []
    for number in range(rounds):
        for endpoints in (1, many) if number % 2 == 0 else (many, 1):
            costs.append(await _cost(endpoints, number))
            progress(f"{endpoints}: {costs[-1].frontend_mib:.0f} MiB, {costs[-1].ready_s:.1f} s")
    _show(costs, many)
    return {"costs": [msgspec.to_builtins(cost) for cost in costs]}


async def _cost(endpoints: int, number: int) -> Cost:
    specs = [mocker(f"e{each}") for each in range(endpoints)]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), specs, (f"--cpu-slots={endpoints}",))
        async with running(server):
            ready_s = await all_ready(server, specs)
            frontend = sum(pss_mib(process.pid) for process in server.of_role("frontend"))
            workers = sum(pss_mib(process.pid) for process in server.of_role("worker host"))
    return Cost(endpoints, number, ready_s, frontend, workers)


def pss_mib(pid: int, *, anonymous: bool = False) -> float:
    """Proportional set size of a process, in MiB: shared pages count in parts. `anonymous`: without those of files,
    whose share changes with other processes that have them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    field = "Pss_Anon:" if anonymous else "Pss:"
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _show(costs: Sequence[Cost], many: int) -> None:
    rows = []
    for endpoints in (1, many):
        mine = [cost for cost in costs if cost.endpoints == endpoints]
        rows.append(
            [
                str(endpoints),
                f"{median([cost.ready_s for cost in mine]):.1f}",
                f"{median([cost.frontend_mib for cost in mine]):.0f}",
                f"{median([cost.workers_mib for cost in mine]):.0f}",
            ]
        )
    table("Endpoints of one server", ["endpoints", "ready, s", "frontend, MiB", "workers, MiB"], rows)
