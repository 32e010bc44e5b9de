"""What the planner asks of the server, at the socket of a server that carries out nothing but what a test says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import BEGIN_PLANNING, GET_ORDER, TAKE_ACTION, Call
from dynamo_local.control.orders import OrderView
from dynamo_local.core.errors import DeviceError, NotRunningError, UnansweredError, UsageError
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker
from dynamo_local.planner import server_orders as module
from dynamo_local.planner.server_orders import ServerOrders
from dynamo_local.supervisor.control.api import ControlApi, Orders
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.supervisor.control.listening import listening

ADD = AddWorker("decode", "VllmWorker")


class Server:
    """`refusals`: errors with which the next requests are answered. `failure`: with which an order ends."""

    def __init__(self, root: Path) -> None:
        self.paths = StatePaths(root, "dynamo")
        self.orders = ServerOrders(ControlClient(self.paths), 60.0)
        self.refusals: list[Exception] = []
        self.failure: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        self.begun = 0
        self.may_end = asyncio.Event()
        self.under_way = asyncio.Event()
        self.tasks = TaskGuard()
        self._orders = Orders(self.tasks)
        self._api = ControlApi()
        self._api.take({TAKE_ACTION: self._take, BEGIN_PLANNING: self._begin, GET_ORDER: self._get})

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        with ServerLock(self.paths):
            async with listening(self._api, self.paths):
                yield

    async def _begin(self, call: Call) -> dict[str, int]:
        self._note(call)
        return {}

    async def _take(self, call: Call) -> OrderView:
        self._note(call)
        return self._orders.begin("planner", call, call.fields()["id"], self._work)

    async def _get(self, call: Call) -> OrderView:
        if self.refusals:
            raise self.refusals.pop(0)
        return await self._orders.get(call)

    def _note(self, call: Call) -> None:
        self.asked.append(call.fields())
        if self.refusals:
            raise self.refusals.pop(0)

    async def _work(self, report: Report) -> Sequence[dict[str, Any]]:
        self.begun += 1
        self.under_way.set()
        report.step("VllmWorker_1  starting")
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return [{"done": True, "watcher": "dynamo_VllmWorker_1", "note": "ready", "took_s": 1.5}]


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(module, "_TRY_EVERY_S", 0.01)
    server = Server(tmp_path)
    yield server
    await server.tasks.close()


async def test_an_action_is_carried_out_once_though_answers_are_lost(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.refusals = [UnansweredError("the server does not answer")]
    async with server.runs():
        acting = asyncio.create_task(server.orders.take_action(ADD, 4, "load 0.95"))
        await server.under_way.wait()
        server.refusals = [UnansweredError("the server does not answer")] * 2
        server.may_end.set()
        assert await acting == ActionOutcome(ADD, True, "dynamo_VllmWorker_1", "ready", 1.5)
    assert server.begun == 1
    assert server.refusals == []
    assert all(order == server.asked[0] for order in server.asked)
    order = server.asked[0]
    assert (order["pid"], order["max_devices"], order["why"], order["ready_timeout_s"]) == (
        os.getpid(),
        4,
        "load 0.95",
        60.0,
    )
    assert (order["action"]["action"], order["action"]["component"]) == ("AddWorker", "VllmWorker")
    assert caplog.messages.count("VllmWorker_1  starting") == 1


async def test_what_the_order_ends_with_is_raised(server: Server) -> None:
    server.failure = DeviceError("no device is free")
    server.may_end.set()
    async with server.runs():
        with pytest.raises(UsageError, match="no device is free"):
            await server.orders.take_action(ADD, 4, "")


async def test_a_server_that_was_started_again_is_told_who_acts(server: Server) -> None:
    unknown, other = (
        UsageError("process 1 is not the planner that acts"),
        UsageError("process 7 is the planner already"),
    )
    server.may_end.set()
    async with server.runs():
        server.refusals = [unknown]
        assert (await server.orders.take_action(ADD, 4, "")).done
        assert server.asked[1] == {"pid": os.getpid()}
        server.refusals = [unknown, other]
        with pytest.raises(UsageError, match="process 7 is the planner already"):
            await server.orders.take_action(ADD, 4, "")
    assert server.begun == 1


async def test_an_action_of_a_planner_that_ends_is_left_to_the_server(server: Server) -> None:
    async with server.runs():
        acting = asyncio.create_task(server.orders.take_action(ADD, 4, ""))
        await server.under_way.wait()
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting
        (order,) = server.tasks._tasks
        server.may_end.set()
        await order


async def test_without_a_server_nothing_is_waited_for(server: Server) -> None:
    for call in (server.orders.take_action(ADD, 4, ""), server.orders.begin_planning(waits=True)):
        with pytest.raises(NotRunningError):
            await call


async def test_beside_another_planner_a_service_waits_and_by_hand_it_is_refused(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = UsageError("process 7 is the planner of namespace dynamo already", "end it")
    async with server.runs():
        server.refusals = [refusal]
        with pytest.raises(UsageError, match="process 7 is the planner of namespace dynamo already; end it"):
            await server.orders.begin_planning(waits=False)
        server.refusals = [UnansweredError("it starts"), refusal, refusal]
        await server.orders.begin_planning(waits=True)
    assert caplog.messages == ["process 7 is the planner of namespace dynamo already; this one waits until it ends"]
    assert server.asked == [{"pid": os.getpid()}] * 5
