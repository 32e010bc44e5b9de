"""This machine as a place, with a real circusd and real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_local.core.names import Watcher
from dynamo_local.process.groups import members
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.daemon import CircusDaemon, CircusFiles
from dynamo_local.supervisor.circus.process_registry import StateRegistry
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.places.local import Books, CircusWatchers, LocalPlaces
from dynamo_local.supervisor.places.port import Slot
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import cpu_slots
from state.machine.processes import this_process
from state.paths import StatePaths
from state.statefile.store import StateStore
from state.statefile.transitions import new_state
from tests.places_contract import DEVICES, NAMESPACE, PlacesContract, Program
from tests.unit.supervisor.recording import RecordingReport

pytestmark = pytest.mark.integration

PROGRAMS: dict[Program, str] = {
    # It has a child, which is to end with it.
    "runs": "sleep 600 & trap 'kill $!; exit' TERM; echo up; wait",
    "dies": "echo 'error: no memory'; exit 1",
    "stubborn": "trap '' TERM; echo up; sleep 600",
}


class NobodyElse:
    """Devices of a machine on which there is no other server."""

    async def elsewhere(self) -> Mapping[int, str]:
        return {}

    async def hold_claimed(self) -> Mapping[int, str]:
        return {}


class CircusSite:
    def __init__(self, paths: StatePaths, circusd: CircusDaemon, circus: CircusClient, devices: int = DEVICES) -> None:
        store = StateStore(paths)
        store.create(new_state(NAMESPACE, circusd.files.endpoint, "cpu-slot", this_process()))
        specs = WatcherSpecs(paths, "", paths.root)
        watchers = CircusWatchers(circus, specs, StateRegistry(store).pid_of, RecordingReport())
        self._log = paths.log_file
        self._circusd = circusd
        self.books = Books(store)
        inventory = cpu_slots(range(devices), devices)
        self.places: LocalPlaces = LocalPlaces(self.books, inventory, NobodyElse(), watchers, self._log)

    def plan(self, watcher: Watcher, slot: Slot, program: Program) -> WatcherPlan:
        argv = ("sh", "-c", f"echo $$ >> {self._log(str(watcher))}.pids; {PROGRAMS[program]}")
        return WatcherPlan(watcher, "decode", argv, devices=slot.devices)

    async def begun(self, name: str) -> None:
        async with asyncio.timeout(60):
            while not self._says_so(name):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a file gives no event

    def pids(self, name: str) -> tuple[int, ...]:
        pids = map(int, Path(f"{self._log(name)}.pids").read_text().split())
        return tuple(pid for pid in pids if members(pid))

    async def lose(self) -> None:
        os.kill(self._circusd.pid, signal.SIGSTOP)

    def _says_so(self, name: str) -> bool:
        log = self._log(name)
        return log.exists() and any(line in log.read_text() for line in ("up\n", "error: "))


@asynccontextmanager
async def circus_site(root: Path, devices: int = DEVICES) -> AsyncIterator[CircusSite]:
    paths = StatePaths(root, NAMESPACE)
    paths.log_file("any").parent.mkdir(parents=True, mode=0o700)
    endpoint, events = f"ipc://{root}/c.sock", f"ipc://{root}/c.pub"
    circusd = CircusDaemon.spawn(CircusFiles(endpoint, events, root / "circus.ini", root / "circusd.log"), os.environ)
    # The deadline is for the circusd that is stopped.
    async with CircusClient(endpoint) as patient, CircusClient(endpoint, deadline_s=2.0) as circus:
        await patient.statuses()
        yield CircusSite(paths, circusd, circus, devices)
        os.kill(circusd.pid, signal.SIGCONT)
        for name in await patient.statuses():
            await patient.remove(name)
        await patient.quit()
    await circusd.end(10)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[CircusSite]:
    async with circus_site(tmp_path) as found:
        yield found


class TestLocalPlaces(PlacesContract):
    pass
