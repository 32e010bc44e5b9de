"""A fault, from a server on which all is well to one on which all is well again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.clients import Clients
from benchmarks.faults.kinds import Fault
from benchmarks.faults.parts import Parts, all_ready, running
from benchmarks.harness.accounting import Process, is_alive
from benchmarks.harness.servers import NAMESPACE, Server, ServerError

READY_WITHIN_S = 120.0
_QUIET_S = 2.0
"""What is watched after all is ready, and where nothing is done."""
_SPREAD_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.05
_PS_EVERY_S = 0.3


@dataclass(frozen=True)
class Trial:
    """What came of one fault. `ready_s`: None if the server ended by it, or all was not ready in time (`note`)."""

    under_way: int
    lost: int
    refused: int
    wrong: int
    gap_s: float
    ready_s: float | None
    note: str
    errors: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def spread(parts: Parts, streams: int) -> None:
    """Wait until each worker runs some of the streams. Raises ServerError if the server is not well."""
    deadline = time.monotonic() + _SPREAD_WITHIN_S
    while time.monotonic() < deadline:
        rows = await parts.rows()
        busy = running(rows)
        if all_ready(rows) and min(busy, default=0) * 4 * len(busy) >= streams:
            return
        await asyncio.sleep(_PS_EVERY_S)
    raise ServerError(f"the streams do not spread over the workers: {busy}")


async def inflict(fault: Fault, number: int, server: Server, parts: Parts, clients: Clients) -> Trial:
    """Do it, and wait until all is as it was. `number` says which of several processes is hit."""
    before, segments = parts.counts(), parts.segments()
    begun = time.monotonic()
    hit = _hit(fault, number, parts)
    if fault.keeps is not None:
        await asyncio.to_thread(_damage, server, fault.keeps)
    note, ready_s = "", None
    try:
        await _wait_out(fault, hit, parts)
        await _until_ready(parts, before, hit if fault.replaces else None)
        ready_s = time.monotonic() - begun
        await asyncio.sleep(_QUIET_S)
    except (ServerError, TimeoutError) as error:
        note = str(error) or f"not ready within {READY_WITHIN_S:g} s"
    finally:
        _go_on(hit)
    if parts.ended:
        note += await _clear(segments)
    seen = clients.seen(begun)
    return Trial(seen.under_way, seen.lost, seen.refused, seen.wrong, seen.gap_s, ready_s, note, seen.errors)


async def _clear(segments: Collection[Path]) -> str:
    """Remove the shared memory that a server has left which ended by a fault. Returns what there was, in words."""
    await asyncio.sleep(_QUIET_S)
    left = [segment for segment in segments if segment.exists()]
    for segment in left:
        segment.unlink()
    return f", {len(left)} segments of shared memory left" if left else ""


def _hit(fault: Fault, number: int, parts: Parts) -> Process | None:
    if fault.number is None:
        return None
    found = parts.processes().get(fault.part, [])
    if not found:
        raise ServerError(f"the server has no {fault.part}")
    process = found[number % len(found)]
    os.kill(process.pid, fault.number)
    return process


def _damage(server: Server, keeps: int) -> None:
    assert server.state_root is not None
    statefile = server.state_root / f"{NAMESPACE}.json"
    if keeps < 0:
        statefile.unlink()
    elif keeps == 0:
        statefile.write_text("{\n")
    else:
        whole = statefile.read_bytes()
        statefile.write_bytes(whole[: len(whole) * keeps // 100])


async def _wait_out(fault: Fault, hit: Process | None, parts: Parts) -> None:
    """Let a stopped process go on when its time has come."""
    over_at = time.monotonic() + fault.lasts_s
    while time.monotonic() < over_at:
        _check(parts)
        await asyncio.sleep(_LOOK_EVERY_S)
    if fault.lasts_s:
        _go_on(hit)


async def _until_ready(parts: Parts, before: Counter[str], replaced: Process | None) -> None:
    """All processes are there again, and say that they are ready. Raises TimeoutError, and ServerError if the server
    ends."""
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            _check(parts)
            gone = replaced is None or not is_alive(replaced)
            if gone and parts.counts() == before and all_ready(await parts.rows()):
                return
            await asyncio.sleep(_LOOK_EVERY_S)


def _check(parts: Parts) -> None:
    if parts.ended:
        raise ServerError("the server ended")


def _go_on(hit: Process | None) -> None:
    if hit is not None and is_alive(hit):
        with suppress(ProcessLookupError):
            os.kill(hit.pid, signal.SIGCONT)
