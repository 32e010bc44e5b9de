"""Requests for endpoints that are parked or asleep: held, the server is asked once, and nobody is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.frontend.endpoint_scene import (
    EndpointScene,
    ImitatedServer,
    announced,
    endpoint_scene,
    listed,
    right,
    view,
)
from tests.unit.frontend.asgi_driver import Answer

pytestmark = pytest.mark.integration

REFUSED = SupervisorError("waking a takes 3 GiB of memory, 1 GiB is free", "end another endpoint")


@pytest.fixture
async def scene(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[EndpointScene]:
    async with endpoint_scene(connect, subjects, tmp_path, hold_timeout_s=60) as scene:
        yield scene


async def asleep(scene: EndpointScene, state: str = "asleep") -> ImitatedServer:
    """Show endpoint a, whose frontend part is built, in a state without workers. Returns the server."""
    server = await scene.server()
    scene.write_graph("a@1")
    await scene.show(listed("a@1", takes=True), endpoints=[view("a", state, min_workers=0)])  # type: ignore[arg-type]
    await until(lambda: next(iter(scene.served.table.entries)).app is not None)
    return server


async def waking(scene: EndpointScene) -> None:
    await scene.show(listed("a@1", takes=True), endpoints=[view("a", "waking", min_workers=0)])


def held_by(fleet: FleetWatch) -> int | None:
    found = announced(fleet)
    return None if found is None or found.counts is None else found.counts.held


async def test_a_hundred_requests_at_once_ask_once_and_are_all_answered(scene: EndpointScene) -> None:
    server = await asleep(scene)
    fleet = await scene.watch_frontend("a@1")
    prompts = [(1, 2, number) for number in range(100)]
    server.may_answer.clear()
    asked = [asyncio.create_task(scene.ask("a", prompt)) for prompt in prompts]
    await scene.held("a", 100)
    await until(lambda: server.orders == ["a"])
    await until(lambda: held_by(fleet) == 100)
    told = await scene.requests("a@1", 10)
    assert ({row.why for row in told.held}, len(told.held), told.left_out) == ({"endpoint a is asleep"}, 10, 90)
    await waking(scene)
    server.may_answer.set()
    assert not any(each.done() for each in asked)
    await scene.mocker("a@1", "w", 300)
    answers = await asyncio.gather(*asked)
    assert [json.loads(each.body)["tokens"] for each in answers] == [right(prompt, 8, 300) for prompt in prompts]
    assert {each.headers["x-dynamo-woken"] for each in answers} == {"asleep"}
    assert all(float(each.headers["x-dynamo-held-s"]) > 0 for each in answers)
    assert (set(server.orders), server.most_under_way) == ({"a"}, 1)
    (series,) = scene.served.table.hold_times.histograms
    assert series == ("a", "asleep", "served")
    await until(lambda: held_by(fleet) == 0)
    # The worker is ready: nothing is asked, and nothing is told.
    number = len(server.orders)
    assert "x-dynamo-woken" not in (await scene.ask("a")).headers
    assert len(server.orders) == number


async def test_a_need_that_persists_is_told_again(scene: EndpointScene) -> None:
    server = await asleep(scene)
    asked = asyncio.create_task(scene.tokens("a", (1,)))
    await until(lambda: len(server.orders) == 2)
    await waking(scene)
    # A start for which nobody asks is given up.
    number = len(server.orders)
    await until(lambda: len(server.orders) > number + 1)
    assert server.most_under_way == 1
    await scene.mocker("a@1", "w", 300)
    assert await asked == right((1,), 8, 300)


async def test_what_is_wrong_is_known_before_anything_is_woken(scene: EndpointScene) -> None:
    server = await asleep(scene)
    assert (await scene.ask("a", tokens=0)).status == 400
    assert (await scene.health()).status == 200, "it answers when it is asked"
    asked = asyncio.create_task(scene.ask("a"))
    await until(lambda: server.orders == ["a"])
    asked.cancel()


async def test_a_client_that_leaves_needs_nothing(scene: EndpointScene) -> None:
    server = await asleep(scene)
    fleet = await scene.watch_frontend("a@1")
    leaves = asyncio.Event()
    left = asyncio.create_task(scene.ask("a", leaves=leaves))
    await until(lambda: held_by(fleet) == 1)
    leaves.set()
    assert (await left).status is None
    await until(lambda: held_by(fleet) == 0)
    model = next(iter(scene.served.models))
    assert (model.dispatcher.live_requests, model.entry.demand) == (0, 0)
    number = len(server.orders)
    endpoint = model.entry.waking
    assert endpoint is not None
    await until(lambda: endpoint._task is None)
    assert number <= len(server.orders) <= number + 1
    await scene.mocker("a@1", "w", 300)
    await until(lambda: model.entry.why_not() is None)
    assert model.dispatcher.live_requests == 0


async def test_a_refusal_is_told_to_all_and_to_those_who_come_right_after(scene: EndpointScene) -> None:
    server = await asleep(scene)
    server.refuses = REFUSED
    answers = await asyncio.gather(*(scene.ask("a") for _ in range(5)))
    answers.append(await scene.ask("a"))
    why = str(REFUSED)
    assert {(each.status, each.error["message"]) for each in answers} == {(503, why)}
    assert all(each.headers["retry-after"] for each in answers)
    assert server.orders == ["a"]


async def test_a_refusal_after_a_second_is_an_event_of_the_stream(scene: EndpointScene) -> None:
    server = await asleep(scene)
    answer = Answer()
    asked = asyncio.create_task(scene.ask("a", stream=True, answer=answer))
    await until(lambda: answer.status == 200)
    assert (answer.headers["x-dynamo-woken"], answer.body) == (
        "asleep",
        b": waiting for a worker of a: endpoint a is asleep\n\n",
    )
    server.refuses = REFUSED
    await asked
    error, done, _ = answer.body.rsplit(b"\n\n", 2)
    assert json.loads(error.rpartition(b"data: ")[2])["error"]["message"].startswith(REFUSED.cause)
    assert done == b"data: [DONE]"


async def test_a_frontend_without_a_server_says_so_and_asks_again(scene: EndpointScene) -> None:
    scene.write_graph("a@1")
    await scene.show(listed("a@1", takes=True), endpoints=[view("a", "asleep", min_workers=0)])
    answer = Answer()
    asked = asyncio.create_task(scene.ask("a", stream=True, answer=answer))
    await until(lambda: b"endpoint a is asleep; the server does not answer this frontend" in answer.body)
    server = await scene.server()
    await until(lambda: bool(server.orders))
    assert not asked.done()
    await scene.mocker("a@1", "w", 300)
    await asked
    # What this application answers is no stream, and so an event.
    assert str(right((1, 2, 3), 8, 300)[0]).encode() in answer.body
    assert b"its endpoint was asleep" in answer.body


async def test_a_worker_that_has_just_been_parked_is_woken_though_the_board_lags(scene: EndpointScene) -> None:
    server = await asleep(scene, "ready")
    worker = await scene.mocker("a@1", "w", 300)
    model = next(iter(scene.served.models))
    await until(lambda: bool(model.fleet.view.ready()))
    assert await scene.tokens("a", (1,)) == right((1,), 8, 300)
    assert server.orders == []
    await worker.announce("parked")
    await until(lambda: not model.fleet.view.ready())
    asked = asyncio.create_task(scene.ask("a"))
    await until(lambda: server.orders == ["a"])
    await worker.announce("ready")
    answer = await asked
    assert (answer.status, answer.headers["x-dynamo-woken"]) == (200, "parked")


async def test_a_conversation_is_told_once_that_its_cache_was_dropped(scene: EndpointScene) -> None:
    server = await asleep(scene, "ready")
    worker = await scene.mocker("a@1", "w", 300)
    model = next(iter(scene.served.models))
    await until(lambda: bool(model.fleet.view.ready()))
    prompt = tuple(range(70))
    assert "x-dynamo-cache" not in (await scene.ask("a", prompt)).headers
    await worker.announce("parked")
    await until(lambda: not model.fleet.view.ready())
    streamed = Answer()
    asked = [
        asyncio.create_task(scene.ask("a", (*prompt, 7))),
        asyncio.create_task(scene.ask("a", (1, 2, 3))),
        asyncio.create_task(scene.ask("a", (*prompt, 8), stream=True, answer=streamed)),
    ]
    # The answer to a stream begins before a worker is ready.
    await until(lambda: streamed.status == 200)
    assert streamed.headers["x-dynamo-cache"] == "dropped"
    await until(lambda: "a" in server.orders)
    await worker.announce("ready")
    again, other, _ = await asyncio.gather(*asked)
    assert again.headers["x-dynamo-cache"] == "dropped"
    assert "x-dynamo-cache" not in other.headers
    assert "x-dynamo-cache" not in (await scene.ask("a", (*prompt, 9))).headers
    assert model.entry.conversations.cold == 1


async def test_a_request_that_loses_the_last_worker_wakes_its_endpoint(scene: EndpointScene) -> None:
    """Also one that had left the gate when its worker was parked, or ended."""
    server = await asleep(scene, "ready")
    worker = await scene.mocker("a@1", "w1", 300)
    model = next(iter(scene.served.models))
    await until(lambda: bool(model.fleet.view.ready()))
    asked = asyncio.create_task(scene.tokens("a", (1,), 2000))
    await until(lambda: bool(worker.context.announcer.presence.load and worker.context.announcer.presence.load.running))
    await worker.announce("failed")
    await until(lambda: server.orders == ["a"])
    await scene.mocker("a@1", "w2", 300)
    assert await asked == right((1,), 2000, 300)


async def test_a_request_for_an_adapter_wakes_the_base(scene: EndpointScene) -> None:
    server = await scene.server()
    scene.write_graph("a@1")
    views = [view("a", "asleep", min_workers=0), view("pirate", "asleep", adapter_of="a")]
    # The revision is not on the board yet, then it is.
    await scene.show(endpoints=views)
    asked = asyncio.create_task(scene.tokens("pirate", (1,)))
    await until(lambda: server.orders == ["a"])
    await scene.show(listed("a@1", takes=True, adapters={"pirate": "/p"}), endpoints=views)
    await scene.held("a", 1)
    await scene.mocker("a@1", "w", 300)
    assert await asked == right((1,), 8, 300)
    assert set(server.orders) == {"a"}


async def test_a_wake_that_failed_is_tried_again_for_the_next_request(scene: EndpointScene) -> None:
    server = await asleep(scene)
    first = asyncio.create_task(scene.ask("a"))
    await until(lambda: server.orders == ["a"])
    await waking(scene)
    failed = [view("a", "failed", "the device is gone", min_workers=0)]
    await scene.show(listed("a@1", takes=True), endpoints=failed)
    answer = await first
    assert (answer.status, answer.error["message"]) == (503, "endpoint a is failed: the device is gone")
    # The server waits before it tries again, then it does.
    server.refuses = REFUSED
    assert REFUSED.cause in (await scene.ask("a")).error["message"]
    server.refuses = None
    endpoint = next(iter(scene.served.models)).entry.waking
    assert endpoint is not None
    await until(lambda: not endpoint._asking.is_recent(time.monotonic()))
    second = asyncio.create_task(scene.ask("a"))
    await scene.held("a", 1)
    await waking(scene)
    await scene.mocker("a@1", "w", 300)
    assert (await second).status == 200
    assert (set(server.orders), len(server.orders) >= 3) == ({"a"}, True)
