"""Faults of a worker's engine: of the engine's processes with vLLM, by orders with a mocker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from dynamo_local.engine.mocker.engine import Order, order_file
from state.machine.processes import Process, alive
from tests.chaos.faults import STALL_TIMEOUT_S, Kind
from tests.chaos.processes import children, command_of

_LOOK_EVERY_S = 0.1
_TAKEN_WITHIN_S = 3.0
"""Time within which a mocker takes an order, in seconds. A mocker without requests takes none."""
_REPLACED_WITHIN_S = STALL_TIMEOUT_S + 60.0


def engine_processes(host: Process, kind: Kind) -> list[Process]:
    """Return vLLM's processes that a fault of this kind hits: EngineCore, or its Workers."""
    cores = [each for each in children(host.pid) if b"VLLM::EngineCore" in command_of(each.pid)]
    if kind is not Kind.KILL_ENGINE_WORKER:
        return cores
    return [each for core in cores for each in children(core.pid) if b"VLLM::Worker" in command_of(each.pid)]


async def order(folder: Path, host: Process, kind: Kind) -> None:
    """Order a mocker to fail, and wait until its worker has ended. Returns early if the mocker takes no order."""
    what: Order = "hang" if kind is Kind.HANG_ENGINE else "raise"
    file = order_file(folder, host.pid)
    draft = file.with_suffix(".draft")
    draft.write_text(what)
    draft.replace(file)
    deadline = time.monotonic() + _TAKEN_WITHIN_S
    while file.exists() and time.monotonic() < deadline:  # noqa: ASYNC110  # nothing tells of a file that is gone
        await asyncio.sleep(_LOOK_EVERY_S)
    if file.exists():
        file.unlink(missing_ok=True)
        return
    await until_gone(host)


async def until_gone(host: Process) -> None:
    """Wait until the worker whose engine has failed has ended. Raises TimeoutError."""
    async with asyncio.timeout(_REPLACED_WITHIN_S):
        while alive(host.pid, host.start_time):  # noqa: ASYNC110  # a foreign process
            await asyncio.sleep(_LOOK_EVERY_S)
