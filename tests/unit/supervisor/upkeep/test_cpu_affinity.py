"""Processes without an engine keep off the cores of those that decode, as long as others leave them the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.process.soft_binding import Shares
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.upkeep.cpu_affinity import CpuAffinity
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import cpu_slots
from state.machine.threads import cores_of
from state.paths import StatePaths
from state.statefile.store import StateStore
from state.statefile.transitions import claim
from tests.unit.state.builders import ScriptedCores, empty_state, python, with_process
from tests.unit.supervisor.recording import RecordingReport

DEADLINE_S = 30.0
CORES = sorted(os.sched_getaffinity(0))[:2]
FIRST, SECOND, BOTH = frozenset(CORES[:1]), frozenset(CORES[1:]), frozenset(CORES)

STARVED = (Shares(1.0, 0.95, {}), {CORES[0]: 0.1, CORES[-1]: 0.95})
QUIET = (Shares(100.0, 0.0, {}), {CORES[0]: 0.1, CORES[-1]: 0.0})

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="on one core there is nothing to keep off")


class Fleet:
    """A worker on the first core, and a frontend, whose process does nothing."""

    def __init__(self, folder: Path, pid: int) -> None:
        store = StateStore(StatePaths(folder, "dynamo"))
        state = claim(empty_state(), "dynamo_Worker", role="aggregated", cmd="w", devices=[0])
        state = claim(state, "dynamo_Frontend", role="frontend", cmd="f")
        store.create(with_process(state, "dynamo_Frontend", "f", pid))
        registration = Registration(store, self.members, RecordingReport())
        self.worker = Presence("dynamo_Worker", "Worker", "aggregated", "w", os.getpid(), "starting")
        self.frontend = Presence("dynamo_Frontend", "Frontend", "frontend", "f", pid, "ready")
        self.watch = ScriptedCores(BOTH, QUIET)
        self.affinity = CpuAffinity(cpu_slots(CORES, 2), registration, self.members, "dynamo_bus", BOTH, self.watch)

    def members(self) -> list[Presence]:
        return [self.worker, self.frontend]

    def appear(self) -> None:
        for presence in self.members():
            self.affinity.on_change(Change(Happened.APPEARED, presence))

    def beat(self, running: int) -> None:
        """Announce the worker with so many running requests."""
        self.worker = msgspec.structs.replace(self.worker, load=Load(running))
        self.affinity.on_change(Change(Happened.UPDATED, self.worker))

    async def until(self, met: Callable[[], bool], *, running: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not met():
                self.beat(running)
                await asyncio.sleep(0.05)


async def test_they_leave_their_cores_while_others_compute_there(tmp_path: Path) -> None:
    with python("print('ready', flush=True); input()") as process:
        fleet, tasks = Fleet(tmp_path, process.pid), TaskGuard()
        tasks.spawn("cores", fleet.affinity.run())
        fleet.appear()
        await fleet.until(lambda: cores_of(process.pid) == SECOND)
        fleet.watch.says = STARVED
        await fleet.until(lambda: cores_of(process.pid) == BOTH)
        fleet.watch.says = QUIET
        await fleet.until(lambda: cores_of(process.pid) == SECOND)
        await tasks.close()


async def test_nobody_looks_while_no_worker_has_requests(tmp_path: Path) -> None:
    with python("print('ready', flush=True); input()") as process:
        fleet, tasks = Fleet(tmp_path, process.pid), TaskGuard()
        tasks.spawn("cores", fleet.affinity.run())
        fleet.appear()
        await fleet.until(lambda: cores_of(process.pid) == SECOND, running=0)
        for _ in range(20):
            fleet.beat(0)
            await asyncio.sleep(0.05)
        assert fleet.watch.looks == 0
        await tasks.close()
