"""The planner of endpoints on a real bus: presences, board and statefile are the test's, and so is the server that
takes its orders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.control.operations import BEGIN_PLANNING, SCALE_ENDPOINT, Call
from dynamo_local.core import codec
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, EndpointConflictError, NotRunningError, UsageError
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView, shown
from dynamo_local.core.messages.presence import Counts, Load, Presence
from dynamo_local.core.messages.reports import Event, PlannerReport
from dynamo_local.core.messages.work import PrefillJob
from dynamo_local.core.names import check_endpoint
from dynamo_local.core.planning.actions import ScaleEndpoint
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.decision_log import DecisionLog
from dynamo_local.planner.session import PlannerSession
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import Device, Inventory
from state.files import make_sockets, remove_run_directory, replace_file
from state.paths import StatePaths
from state.record import ServerRecord, write_record
from state.statefile.model import Owner
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state

pytestmark = pytest.mark.integration

QUICK = PlannerOptions(adjustment_interval=0.2, metric_pulling_interval=0.02, endpoint_concurrency_window=0.3)
CHAT, CODE = "chat@2", "code@1"


@dataclass
class FakeServer:
    """A server with endpoints `chat` (aggregated, revision 2 takes requests) and `code` (disaggregated). It shows what
    is ordered on its board, and starts nobody. `has_planner`: another one acts."""

    bus: Bus
    paths: StatePaths
    statuses: dict[str, EndpointStatus] = field(default_factory=dict)
    orders: list[ScaleEndpoint] = field(default_factory=list)
    refuses: str = ""
    has_planner: bool = False
    number: int = 0

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.paths.namespace)

    async def start(self) -> None:
        self.statuses = {
            "chat": EndpointStatus("ready", revision=2, wanted=1),
            "code": EndpointStatus("ready", wanted=1, wanted_prefill=1),
        }
        self.paths.run_dir.mkdir(parents=True)
        state = new_state(self.paths.namespace, "ipc:///nowhere", "cpu-slot", Owner(1, 1))
        names = {f"{CHAT}_VllmWorker": "aggregated", f"{CODE}_VllmWorker": "decode", f"{CODE}_PrefillWorker": "prefill"}
        for device, (name, role) in enumerate(names.items()):
            state = claim(state, f"{self.paths.namespace}_{name}", role=role, cmd="run", devices=[device])
        StateStore(self.paths).create(state)
        slots = tuple(Device(number, "cpu-slot", "slot") for number in range(8))
        inventory = Inventory("cpu-slot", slots, exclusive=False)
        Blueprint("pipe", "/", inventory, (), 60.0, 60.0).write(self.paths.blueprint_file)
        write_record(self.paths, ServerRecord("running"))
        self.show()
        api = ControlApi()
        api.take({SCALE_ENDPOINT: self.scale, BEGIN_PLANNING: self.begin_planning})
        self._socket = ControlSocket(api, make_sockets(self.paths).control)
        self._answering = asyncio.create_task(self._socket.run())

    async def close(self) -> None:
        await self._socket.close(self._answering)
        remove_run_directory(self.paths)

    def show(self) -> None:
        """Write the board."""
        self.number += 1
        specs = (
            EndpointSpec(name="chat", model="m", max_workers=8, requests_per_worker=4),
            EndpointSpec(name="code", model="m", disaggregated=True, max_prefill_workers=2),
        )
        views = (EndpointView(spec, self.statuses[spec.name], 1.0, 1.0) for spec in specs)
        revisions = (
            BoardRevision("chat@1", False, ("chat",)),
            BoardRevision(CHAT, True, ("chat",)),
            BoardRevision(CODE, True, ("code",)),
        )
        replace_file(self.paths.board_file, msgspec.json.encode(Board(self.number, revisions, tuple(views))))

    async def begin_planning(self, _: Call) -> dict[str, Any]:
        if self.has_planner:
            raise UsageError(f"process 7 is the planner of namespace {self.paths.namespace} already")
        return {}

    async def scale(self, call: Call) -> dict[str, Any]:
        order = ScaleEndpoint(call.name(check_endpoint), **call.fields())
        self.orders.append(order)
        if self.refuses:
            raise EndpointConflictError(self.refuses)
        status = self.statuses[order.name]
        wanted = status.wanted if order.workers is None else order.workers
        prefill = status.wanted_prefill if order.prefill_workers is None else order.prefill_workers
        self.statuses[order.name] = msgspec.structs.replace(status, wanted=wanted, wanted_prefill=prefill)
        self.show()
        return shown(EndpointView(EndpointSpec(name=order.name, model="m"), self.statuses[order.name], 1.0, 1.0))

    async def announce(self, revision: str, watcher: str, role: str, *, in_flight: int | None = None) -> None:
        """Publish the presence of a worker of the revision, or of a frontend that serves it."""
        owner = f"{revision}_{watcher}" if role != "frontend" else watcher
        presence = Presence(
            f"{self.paths.namespace}_{owner}",
            watcher,
            role,
            f"{revision}-{watcher}",
            1,
            "ready",
            load=Load(1, 0, 0.5, age_s=0.0),
            counts=Counts(in_flight=in_flight),
            revision=revision,
        )
        subjects = Subjects(self.paths.namespace, revision)
        await self.bus.publish(subjects.presence(presence.watcher, presence.role), codec.encode(presence))


@pytest.fixture
async def server(bus: Bus, subjects: Subjects, tmp_path: Path) -> AsyncIterator[FakeServer]:
    server = FakeServer(bus, StatePaths(tmp_path, subjects.namespace))
    await server.start()
    yield server
    await server.close()


@dataclass
class Planning:
    """A planner that runs as a service of a graph without workers of its own, or is started by hand."""

    server: FakeServer
    options: PlannerOptions = QUICK
    by_hand: bool = False
    tasks: TaskGuard = field(default_factory=TaskGuard)

    async def start(self) -> None:
        paths = self.server.paths
        log = DecisionLog(paths.root / "decisions.jsonl", {"namespace": paths.namespace})
        watcher = "" if self.by_hand else f"{paths.namespace}_Planner"
        session = PlannerSession(paths, self.options, lambda: [log], watcher)
        self.tasks.spawn("planner", session.run(self.server.bus, self.tasks))

    @property
    def lines(self) -> list[dict[str, object]]:
        path = self.server.paths.root / "decisions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
async def planning(server: FakeServer) -> AsyncIterator[Planning]:
    planning = Planning(server)
    await planning.start()
    yield planning
    assert await planning.tasks.close() == []


async def beat(server: FakeServer, in_flight: int | None) -> None:
    """What all processes announce: requests are in flight for revision 2 of chat; those for revision 1 do not count."""
    await server.announce("chat@1", "Frontend", "frontend", in_flight=1000)
    await server.announce(CHAT, "Frontend", "frontend", in_flight=in_flight)
    await server.announce(CODE, "Frontend", "frontend", in_flight=0)
    await server.announce(CHAT, "VllmWorker", "aggregated")


async def until_beating(server: FakeServer, in_flight: int | None, condition: Callable[[], object]) -> None:
    """Announce all processes until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await beat(server, in_flight)
            await asyncio.sleep(0.02)


async def test_workers_are_ordered_at_once_and_given_back_after_the_window(
    server: FakeServer, planning: Planning
) -> None:
    await until_beating(server, 22, lambda: server.orders)
    assert server.orders == [ScaleEndpoint("chat", 6)]
    await until_beating(server, 3, lambda: sum(line["order"] is not None for line in planning.lines) > 1)
    assert server.orders[1] == ScaleEndpoint("chat", 1)
    first, second = (line for line in planning.lines if line["order"])
    assert (first["endpoint"], first["outcome"]) == ("chat", {"done": True, "note": ""})
    assert "at most 22 requests in flight" in str(first["text"])
    assert "chat: 1 worker instead of 6" in str(second["text"])


async def test_nothing_is_changed_before_all_of_the_server_has_been_ready(server: FakeServer) -> None:
    write_record(server.paths, ServerRecord("starting"))
    planning = Planning(server)
    await planning.start()
    for _ in range(50):
        await beat(server, 22)
        await asyncio.sleep(0.02)
    assert (server.orders, planning.lines) == ([], [])
    write_record(server.paths, ServerRecord("running"))
    await until_beating(server, 22, lambda: server.orders)
    assert await planning.tasks.close() == []


async def test_jobs_in_the_prefill_queue_of_an_endpoint_bring_prefill_workers(
    bus: Bus, server: FakeServer, planning: Planning
) -> None:
    scope = Subjects(server.paths.namespace, CODE)
    await create_prefill_queue(bus, scope)
    for number in range(5):
        await PrefillQueue(bus, scope).publish(PrefillJob(f"j{number}", "r", "f", 100, 3600.0))
    await until_beating(server, 0, lambda: server.orders)
    assert server.orders == [ScaleEndpoint("code", None, 2)]


async def test_without_a_number_from_the_frontend_nothing_is_ordered(server: FakeServer, planning: Planning) -> None:
    await until_beating(server, None, lambda: planning.lines)
    assert "the number of requests in flight cannot be read" in str(planning.lines[0]["text"])
    await until_beating(server, 22, lambda: server.orders)
    assert server.orders == [ScaleEndpoint("chat", 6)]


async def test_a_refused_order_is_on_record_and_tried_again(server: FakeServer, planning: Planning) -> None:
    server.refuses = "endpoint chat is being updated"
    await until_beating(server, 22, lambda: server.orders)
    await until_beating(server, 22, lambda: any(line["outcome"] for line in planning.lines))
    refused = next(line for line in planning.lines if line["outcome"])
    assert refused["outcome"] == {"done": False, "note": "endpoint chat is being updated"}
    server.refuses = ""
    await until_beating(server, 22, lambda: server.statuses["chat"].wanted == 6)


async def test_what_the_server_does_by_itself_is_on_record(server: FakeServer, planning: Planning) -> None:
    parked = Event("park", "parked", "no request for 60 s", endpoint="chat", cause="idle", time=1.0)

    def recorded() -> list[dict[str, object]]:
        return [line for line in planning.lines if "change" in line]

    async with asyncio.timeout(60):
        # Until the planner has its lock, it does not listen.
        while not recorded():
            await server.bus.send(server.subjects.endpoint_changes, parked)
            await asyncio.sleep(0.02)
    line = recorded()[0]
    assert (line["endpoint"], line["change"], line["cause"]) == ("chat", "park", "idle")


async def test_an_observer_reports_what_it_would_order(server: FakeServer) -> None:
    planning = Planning(server, replace(QUICK, no_operation=True))
    reports: list[PlannerReport] = []

    async def on_report(report: PlannerReport) -> None:
        reports.append(report)

    await server.bus.listen(server.subjects.planner, PlannerReport, on_report)
    await planning.start()
    await until_beating(server, 22, lambda: reports and reports[-1].decisions)
    assert "chat: would have 6 workers instead of 1" in reports[-1].decisions[-1].text
    chat = reports[-1].endpoints[0]
    assert (chat.endpoint, chat.ready, chat.in_flight, chat.wanted) == ("chat", 1, 22, 6)
    assert server.orders == []
    assert await planning.tasks.close() == []


async def test_a_planner_by_hand_orders_too_unless_the_workers_exceed_its_budget(server: FakeServer) -> None:
    planning = Planning(server, by_hand=True)
    await planning.start()
    await until_beating(server, 22, lambda: server.orders)
    assert await planning.tasks.close() == []
    too_small = Planning(server, replace(QUICK, max_gpu_budget=2), by_hand=True)
    await too_small.start()
    with pytest.raises(ConfigError, match="max-gpu-budget is 2, and the workers hold 3 devices"):
        await asyncio.wait_for(too_small.tasks.failed(), 60)
    assert await too_small.tasks.close() == []


async def test_beside_one_that_acts_a_planner_is_refused_by_hand_and_waits_as_a_service(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.has_planner = True
    by_hand = Planning(server, by_hand=True)
    await by_hand.start()
    with pytest.raises(UsageError, match=r"is the planner of namespace .* already"):
        await asyncio.wait_for(by_hand.tasks.failed(), 60)
    assert await by_hand.tasks.close() == []
    assert "waits until it ends" not in caplog.text
    service = Planning(server)
    await service.start()
    await until_beating(server, 22, lambda: "waits until it ends" in caplog.text)
    assert server.orders == []
    server.has_planner = False
    await until_beating(server, 22, lambda: server.orders)
    assert await service.tasks.close() == []


async def test_a_server_that_has_ended_ends_the_planner(server: FakeServer) -> None:
    planning = Planning(server)
    await planning.start()
    await until_beating(server, 22, lambda: server.orders)
    StateStore(server.paths).remove()
    with pytest.raises(NotRunningError):
        await asyncio.wait_for(planning.tasks.failed(), 60)
    assert await planning.tasks.close() == []
