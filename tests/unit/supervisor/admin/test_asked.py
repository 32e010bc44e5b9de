"""What a server knows of its own processes: from the start on, while NATS is away, and when an engine has failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from dynamo_local.core.errors import BusError, SupervisorError
from dynamo_local.core.fleet.view import Change, FleetView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.requests import list_requests
from dynamo_local.supervisor.admin.watchers import list_watchers
from dynamo_local.supervisor.circus.process_registry import Registration
from state.machine.processes import this_process
from state.paths import StatePaths
from state.statefile.model import Component, Resources
from state.statefile.store import StateStore
from state.statefile.transitions import new_state
from tests.unit.supervisor.recording import RecordingReport

READY = Presence("ns_W", "W", "decode", "lease", 7, "ready")


class Circus:
    async def statuses(self) -> dict[str, str]:
        return {"ns_W": "active"}

    async def pids(self, _: str) -> tuple[int, ...]:
        return (7,)


class Bus:
    async def listen(self, *_: Any) -> None:
        """No planner reports."""


class Watch:
    """A view of processes, and whether NATS brings messages back."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.is_heard = True
        self._listeners: list[Callable[[Change], None]] = []

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        self._listeners.append(listener)

    async def hears(self, _: float) -> bool:
        return self.is_heard

    def observe(self, presence: Presence) -> None:
        for change in self.view.observe(presence, 1.0):
            for listener in self._listeners:
                listener(change)


@pytest.fixture
def server(tmp_path: Path) -> AskedServer:
    paths = StatePaths(tmp_path, "ns")
    store = StateStore(paths)
    state = new_state("ns", "ipc:///nowhere/circus.sock", "cpu-slot", this_process(), {})
    worker = Component("ns_W", "W", "decode", "cmd", Resources((1,)), lease="lease", pid=7)
    store.create(replace(state, components={"ns_W": worker}))
    return AskedServer(paths, store, cast("Any", Circus()), lambda _: None)


@pytest.fixture
async def watch(server: AskedServer) -> Watch:
    watch = Watch()
    registration = Registration(server.store, watch.view.members, RecordingReport())
    watch.subscribe(registration.on_change)
    await server.follow(cast("Any", Bus()), cast("Any", watch), registration)
    return watch


async def told(server: AskedServer) -> tuple[str, str]:
    (row,) = await list_watchers(server)
    return row.state, row.detail


async def test_processes_are_listed_before_there_is_a_bus_and_requests_are_not(server: AskedServer) -> None:
    assert await told(server) == ("unknown", "the bus does not answer")
    with pytest.raises(SupervisorError, match="only starting"):
        await list_requests(server, 10)


async def test_while_nats_is_away_nothing_is_known_of_processes_and_of_requests(
    server: AskedServer, watch: Watch
) -> None:
    watch.observe(READY)
    assert await told(server) == ("ready", "")
    watch.is_heard = False
    assert await told(server) == ("unknown", "the bus does not answer")
    with pytest.raises(BusError, match="the bus does not answer"):
        await list_requests(server, 10)


async def test_a_worker_whose_engine_has_failed_says_so_until_another_one_takes_its_place(
    server: AskedServer, watch: Watch
) -> None:
    watch.observe(READY)
    watch.observe(replace(READY, state="failed", detail="out of memory"))
    assert await told(server) == ("failed", "out of memory")
    watch.observe(replace(READY, lease="another", state="starting"))
    assert await told(server) == ("starting", "")
