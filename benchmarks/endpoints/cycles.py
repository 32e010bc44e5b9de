"""Many cycles of park and wake of an endpoint, each wake by a request: do blocks, files, processes or memory grow?"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.endpoints.asleep import Sleepers, sleeper, sleeping
from benchmarks.endpoints.cost import pss_mib
from benchmarks.harness.accounting import Process
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import ServerError
from benchmarks.harness.spread import median, quantile
from dynamo_local.control.operations import PARK_ENDPOINT
from dynamo_local.core.names import Revision

NAME = "chat"
_TOKENS = 4
_ROLES = ("dynamo serve", "frontend", "planner", "worker host", "circusd", "nats")
_LOOKS = 10
_QUIET_S = 3.0


class Held(msgspec.Struct, frozen=True):
    """What the server has after so many cycles, parked, by role: MiB of anonymous memory, and open files."""

    cycles: int
    processes: int
    mib: dict[str, float]
    files: dict[str, int]


async def measure(cycles: int) -> Figures:
    """Measure, print, and return the figures."""
    looks: list[Held] = []
    times: list[float] = []
    wrong = 0
    async with sleeping([sleeper(NAME)]) as sleepers, PresenceLog(sleepers.server, str(Revision(NAME, 1))) as presences:
        right = await _ask(sleepers, 0)
        for number in range(1, cycles + 1):
            await sleepers.order(PARK_ENDPOINT, name=NAME)
            await sleepers.until(NAME, "parked")
            if number == 1 or number % max(1, cycles // _LOOKS) == 0:
                looks.append(_look(sleepers, number))
                progress(
                    f"{number} cycles: {sum(looks[-1].mib.values()):.0f} MiB, {sum(looks[-1].files.values())} files"
                )
            ttft_s, text = await _ask(sleepers, number)
            times.append(ttft_s)
            wrong += text != right[1]
        kv_usage = await _kv_usage(presences)
    _show(looks, times, wrong, kv_usage)
    return {
        "looks": [msgspec.to_builtins(one) for one in looks],
        "first_token_median_s": median(times),
        "first_token_p99_s": quantile(times, 0.99),
        "wrong": wrong,
        "kv_usage": kv_usage,
    }


async def _ask(sleepers: Sleepers, number: int) -> tuple[float, list[int]]:
    """Time to the first token, and the tokens. Raises ServerError."""
    async with sleepers.client(NAME) as client:
        answer = await client.complete("the same question", _TOKENS)
    if not answer.is_completed or answer.ttft_s is None:
        raise ServerError(f"cycle {number}: {answer.failure}")
    return answer.ttft_s, answer.token_ids


def _look(sleepers: Sleepers, cycles: int) -> Held:
    sleepers.server.refresh()
    processes = sleepers.server.processes
    mib: dict[str, float] = {}
    files: dict[str, int] = {}
    for process in processes:
        if process.role in _ROLES:
            mib[process.role] = mib.get(process.role, 0.0) + pss_mib(process.pid, anonymous=True)
            files[process.role] = files.get(process.role, 0) + _files(process)
    return Held(cycles, len(processes), mib, files)


async def _kv_usage(presences: PresenceLog) -> float | None:
    """Share of the worker's KV blocks that are in use once its requests have ended. None: unknown."""
    await asyncio.sleep(_QUIET_S)
    loads = [one.load for one in presences.latest().values() if one.load is not None]
    return None if not loads or loads[-1].kv_usage is None else loads[-1].kv_usage + (loads[-1].kv_pinned or 0)


def _files(process: Process) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir())
    return 0


def _show(looks: Sequence[Held], times: Sequence[float], wrong: int, kv_usage: float | None) -> None:
    rows = []
    for role in _ROLES:
        if role in looks[0].mib:
            rows.append([f"{role}, MiB", *(f"{one.mib.get(role, 0):.1f}" for one in looks)])
            rows.append([f"{role}, files", *(str(one.files.get(role, 0)) for one in looks)])
    rows.append(["processes", *(str(one.processes) for one in looks)])
    table("Cycles of park and wake", ["after", *(str(one.cycles) for one in looks)], rows)
    told = f"{median(times) * 1e3:.0f} ms, p99 {quantile(times, 0.99) * 1e3:.0f} ms"
    used = "unknown" if kv_usage is None else f"{kv_usage:.1%}"
    print(f"from a request to its first token: {told}; other answers: {wrong}; KV blocks in use at the end: {used}")
