"""Orders that take long: an order is carried out once, whoever asks for it again, and to its end, whoever goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import SCALE, Call
from dynamo_local.control.orders import OrderView, carry_out
from dynamo_local.core.errors import SupervisorError, UsageError
from dynamo_local.supervisor.control.api import AT_ONCE, KEPT, ControlApi, Orders
from dynamo_local.supervisor.control.http import application
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.supervisor.control.listening import listening

DONE = {"action": "AddWorker", "done": True}


class Workshop:
    """A server whose orders to scale do what a test says."""

    def __init__(self) -> None:
        self.tasks = TaskGuard()
        self.begun = 0
        self.ids = set[str]()
        self.loop = asyncio.get_running_loop()
        self.go_on = asyncio.Event()
        self.work: Callable[[Report], Awaitable[Sequence[dict[str, Any]]]] = self.two_steps
        self.orders = Orders(self.tasks)
        self.api = ControlApi()
        self.api.take(self.orders.handlers)
        self.api.take({SCALE: self.scale})

    async def scale(self, call: Call) -> OrderView:
        self.ids.add(call.fields()["id"])
        return self.orders.begin("scale", call, call.fields()["id"], self.work)

    def follow(self, root: Path, step: Callable[[str], None]) -> Sequence[dict[str, Any]]:
        return carry_out(ControlClient(StatePaths(root, "dynamo")), SCALE, {}, step)

    async def followed(self, root: Path, step: Callable[[str], None]) -> Sequence[dict[str, Any]]:
        async with self.listening(root):
            return await asyncio.to_thread(self.follow, root, step)

    @asynccontextmanager
    async def listening(self, root: Path) -> AsyncIterator[None]:
        paths = StatePaths(root, "dynamo")
        with ServerLock(paths):
            async with listening(self.api, paths):
                yield

    async def two_steps(self, report: Report) -> Sequence[dict[str, Any]]:
        self.begun += 1
        report.step("first")
        await self.go_on.wait()
        report.step("second")
        return [DONE]

    async def ask(self, method: str, path: str, fields: Any = None) -> httpx.Response:
        transport = httpx.ASGITransport(application(self.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, json=fields)

    async def order(self, order_id: str = "one", **fields: Any) -> httpx.Response:
        return await self.ask("POST", "/v1/scale", {"id": order_id, **fields})

    async def ended(self, order_id: str = "one") -> dict[str, Any]:
        """The order, once it has ended, asked for as a client does that has seen all steps so far."""
        seen = 0
        while True:
            found: dict[str, Any] = (await self.ask("GET", f"/v1/orders/{order_id}?after={seen}")).json()
            if found["state"] != "running":
                return found
            seen += len(found["steps"])


@pytest.fixture
async def shop() -> Any:
    shop = Workshop()
    yield shop
    await shop.tasks.close()


async def test_an_order_is_answered_when_it_is_begun_and_followed_step_by_step(shop: Workshop) -> None:
    answer = await shop.order()
    assert (answer.status_code, answer.json()["state"], answer.json()["outcomes"]) == (202, "running", [])
    found = (await shop.ask("GET", "/v1/orders/one?after=0")).json()
    assert (found["state"], found["steps"]) == ("running", ["first"])
    waiting = asyncio.create_task(shop.ask("GET", "/v1/orders/one?after=1"))
    shop.go_on.set()
    assert (await waiting).json()["steps"] == ["second"]
    assert await shop.ended() == {
        "object": "order",
        "id": "one",
        "command": "scale",
        "state": "done",
        "steps": ["first", "second"],
        "outcomes": [DONE],
        "error": None,
    }


async def test_an_order_that_is_given_again_is_carried_out_once(shop: Workshop) -> None:
    for _ in range(3):
        assert (await shop.order(targets={"VllmWorker": 2})).status_code == 202
    shop.go_on.set()
    assert (await shop.ended())["state"] == "done"
    again = (await shop.order(targets={"VllmWorker": 2})).json()
    assert (again["state"], shop.begun) == ("done", 1)
    other = await shop.order(targets={"VllmWorker": 3})
    assert (other.status_code, other.json()["error"]["param"], shop.begun) == (400, "id", 1)


async def test_orders_without_an_id_are_told_apart(shop: Workshop) -> None:
    ids = {(await shop.order("")).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    assert "" not in ids


async def test_an_order_that_nobody_knows_is_not_there(shop: Workshop) -> None:
    answer = await shop.ask("GET", "/v1/orders/none")
    assert (answer.status_code, "no order has the id 'none'" in answer.text) == (404, True)


async def test_why_an_order_fails_is_told_and_costs_the_server_nothing(shop: Workshop) -> None:
    async def refuse(_: Report) -> Sequence[dict[str, Any]]:
        raise UsageError("there is no such worker", "see `dynamo ps`")

    async def break_down(_: Report) -> Sequence[dict[str, Any]]:
        raise ZeroDivisionError("by nothing")

    async def half(_: Report) -> Sequence[dict[str, Any]]:
        return [DONE, {"done": False, "note": "it hangs"}]

    told = {}
    for name, work in (("refuse", refuse), ("break", break_down), ("half", half)):
        shop.work = work
        await shop.order(name)
        found = await shop.ended(name)
        assert found["state"] == "failed"
        told[name] = found["error"] and (found["error"]["code"], found["error"]["message"])
    assert told == {
        "refuse": (400, "there is no such worker; see `dynamo ps`"),
        "break": (503, "ZeroDivisionError: by nothing; see the log"),
        "half": None,
    }


async def test_a_server_that_stops_says_so_to_those_who_wait(shop: Workshop) -> None:
    await shop.order()
    await shop.ask("GET", "/v1/orders/one?after=0")
    waiting = asyncio.create_task(shop.ask("GET", "/v1/orders/one?after=1"))
    await shop.tasks.close()
    found = (await waiting).json()
    assert (found["state"], found["error"]["cause"]) == ("failed", "the server is stopping")


async def test_the_number_of_orders_is_bounded_and_those_that_run_are_never_forgotten(shop: Workshop) -> None:
    for number in range(AT_ONCE):
        assert (await shop.order(f"running-{number}")).status_code == 202
    refused = await shop.order("one-more")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    shop.go_on.set()
    await shop.ended(f"running-{AT_ONCE - 1}")
    for number in range(KEPT):
        await shop.order(f"later-{number}")
        await shop.ended(f"later-{number}")
    known = [(await shop.ask("GET", f"/v1/orders/{name}")).status_code for name in ("running-0", "later-0")]
    assert known == [404, 200]


async def test_a_command_shows_the_steps_and_returns_the_outcomes(shop: Workshop, tmp_path: Path) -> None:
    steps: list[str] = []

    def step(text: str) -> None:
        steps.append(text)
        shop.loop.call_soon_threadsafe(shop.go_on.set)

    assert await shop.followed(tmp_path, step) == [DONE]
    assert (steps, shop.begun) == (["first", "second"], 1)


async def test_a_command_raises_what_the_order_ended_with(shop: Workshop, tmp_path: Path) -> None:
    async def refuse(_: Report) -> Sequence[dict[str, Any]]:
        raise UsageError("there is no such worker", "see `dynamo ps`")

    shop.work = refuse
    with pytest.raises(UsageError, match="there is no such worker; see `dynamo ps`"):
        await shop.followed(tmp_path, lambda _: None)


async def test_a_command_that_is_interrupted_leaves_its_order_to_the_server(shop: Workshop, tmp_path: Path) -> None:
    steps: list[str] = []

    def step(text: str) -> None:
        steps.append(text)
        if len(steps) == 1:
            raise KeyboardInterrupt

    def follow() -> str:
        # As an exception of the event loop's own it would end the test run.
        try:
            shop.follow(tmp_path, step)
        except KeyboardInterrupt:
            return "interrupted"
        return "ended"

    async with shop.listening(tmp_path):
        assert await asyncio.to_thread(follow) == "interrupted"
    assert [text.split(":")[0] for text in steps] == ["first", "interrupted"]
    shop.go_on.set()
    (order,) = shop.ids
    assert (await shop.ended(order))["state"] == "done"


async def test_a_command_whose_server_is_replaced_by_another_one_says_that_it_has_ended(tmp_path: Path) -> None:
    shop, other = Workshop(), Workshop()

    def step(_: str) -> None:
        shop.api.take(other.orders.handlers)

    with pytest.raises(SupervisorError, match="the server has ended meanwhile"):
        await shop.followed(tmp_path, step)
    await shop.tasks.close()
