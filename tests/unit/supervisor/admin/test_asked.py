"""What a server knows of its own processes: from the start on, while NATS is away, and when an engine has failed; and
the revisions and processes that it asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import BusError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import Change, FleetView
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.admin.asked import AskedServer, ask, endpoint_names, known_revisions, shown_model
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


class DeafBus:
    async def ask(self, subject: str, *_: Any, **__: Any) -> Any:
        raise BusError(f"no process listens on {subject}")


async def test_a_process_that_does_not_answer_is_named() -> None:
    with pytest.raises(BusError) as caught:
        await ask(
            cast("Any", DeafBus()), "ns_Frontend", "dyn.ns.role.a1", RoleQuestion("decode"), RoleAnswer, timeout_s=1
        )
    assert str(caught.value) == (
        "Frontend does not answer; it may have ended or be overloaded: see `dynamo ps` and `dynamo logs Frontend`"
    )


CHAT = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("updating"), 1.0, 2.0, ("chat",))
FAILED = EndpointView(EndpointSpec(name="broken", model="m"), EndpointStatus("failed"), 1.0, 2.0)
BOARD = Board(3, (BoardRevision("chat@10", False, ("chat",)), BoardRevision("chat@9", True, ("chat",))), (CHAT, FAILED))


def test_revisions_are_those_of_processes_and_of_the_board() -> None:
    assert known_revisions(["chat@9", "", "base@2", "chat@9"], BOARD) == ["base@2", "chat@9", "chat@10"]
    assert known_revisions([], None) == []


def test_the_revisions_of_one_endpoint_are_told_apart() -> None:
    assert known_revisions(["", "base@2"], BOARD, "chat") == ["chat@9", "chat@10"]
    assert known_revisions(["", "base@2"], None, "base") == ["base@2"]
    assert known_revisions([""], BOARD, "broken") == []


def test_an_endpoint_that_there_is_not_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(UsageError, match="there is no endpoint 'cha'; there are: base, broken, chat"):
        known_revisions(["base@2"], BOARD, "cha")
    with pytest.raises(UsageError, match="there are: none"):
        known_revisions([""], None, "")


def test_names_are_those_of_endpoints_with_or_without_processes() -> None:
    assert endpoint_names(["", "base@2", "base@3"], BOARD) == ["base", "broken", "chat"]


def test_a_model_is_named_by_its_revision() -> None:
    assert (shown_model("chat@2"), shown_model("main@1")) == ("chat@2", "the server's own model")
