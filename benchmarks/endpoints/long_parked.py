"""How an endpoint wakes that has been parked for long, and whether anything has touched its worker meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from benchmarks.endpoints.cost import pss_mib
from benchmarks.harness.accounting import Process, read_stat
from benchmarks.harness.report import progress, table
from benchmarks.harness.servers import NAMESPACE, Server
from dynamo_local.supervisor.server.reports.event_log import EventReader
from state.paths import StatePaths

_ENGINE_ROLES = ("worker host", "EngineCore", "Worker")
_SETTLES_S = 5.0


class Parked(msgspec.Struct, frozen=True):
    """A parked worker's processes. MiB are proportional set sizes.

    `cores`: CPU while parked, as a share of a core. `ttft_s`, `again_s`: of the request that woke it, and of the next
    one. `same`: whether the processes are the ones that were parked. `events`: what the server noted while it was
    parked, and when it woke.
    """

    model: str
    parked_s: float
    before_mib: float
    mib: float
    at_end_mib: float
    cores: float
    ttft_s: float
    again_s: float
    same: bool
    events: tuple[str, ...]


async def stay(
    server: Server,
    model: str,
    parked_s: float,
    park: Callable[[], Awaitable[None]],
    ask: Callable[[], Awaitable[float]],
) -> Parked:
    """Park the worker for so long, then wake it by a request. Times of `ask` are those to the first token."""
    assert server.state_root is not None
    events = EventReader(StatePaths(server.state_root, NAMESPACE).events_file)
    await ask()
    before, pids = _engine(server), [process.pid for process in _engine(server)]
    before_mib = sum(map(pss_mib, pids))
    await park()
    events.new()
    began, used = time.monotonic(), _cpu_s(pids)
    await asyncio.sleep(min(_SETTLES_S, parked_s / 2))
    mib = sum(map(pss_mib, pids))
    progress(f"parked, {mib:.0f} MiB, for {parked_s:.0f} s (load average {os.getloadavg()[0]:.1f})")
    await asyncio.sleep(began + parked_s - time.monotonic())
    cores, at_end_mib = (_cpu_s(pids) - used) / parked_s, sum(map(pss_mib, pids))
    ttft_s = await ask()
    again_s = await ask()
    told = tuple(f"{event.kind} {event.what}" for event in events.new())
    same = _engine(server) == before
    progress(f"woken after {parked_s:.0f} s in {ttft_s:.3f} s (load average {os.getloadavg()[0]:.1f})")
    return Parked(model, parked_s, before_mib, mib, at_end_mib, cores, ttft_s, again_s, same, told)


def show(parked: Sequence[Parked]) -> None:
    """Print it."""
    rows = []
    for one in parked:
        mib = [f"{each:.0f}" for each in (one.before_mib, one.mib, one.at_end_mib)]
        took = [f"{one.ttft_s:.3f}", f"{one.again_s:.3f}", "yes" if one.same else "no"]
        rows.append([one.model, f"{one.parked_s:g}", *mib, f"{100 * one.cores:.2f}", *took])
    headers = ("model", "parked for, s", "MiB before", "parked", "at the end", "% of a core")
    table("A parked worker", (*headers, "first token, s", "next", "same processes"), rows)
    for one in parked:
        print(f"noted while it was parked for {one.parked_s:g} s: {', '.join(one.events) or 'nothing'}")


def _engine(server: Server) -> tuple[Process, ...]:
    server.refresh()
    return tuple(process for role in _ENGINE_ROLES for process in server.of_role(role))


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(stat.cpu_s for pid in pids if (stat := read_stat(pid)) is not None)
