"""Orders to replace the token of NATS."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dynamo_local.control.operations import Call
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.server.nats.rotation import Rotated, TokenOrders, TokenRotation
from dynamo_local.tasks import TaskGuard
from tests.unit.supervisor.recording import RecordingReport


class Rotations:
    """Rotations that end when they are told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.outcome: asyncio.Future[Rotated] = asyncio.get_running_loop().create_future()

    async def rotate(self) -> Rotated:
        self.begun += 1
        return await self.outcome


class Scene:
    def __init__(self) -> None:
        self.rotations = Rotations()
        self.tasks = TaskGuard()
        self.events: list[Event] = []
        rotation = cast(TokenRotation, self.rotations)
        self.orders = TokenOrders(rotation, self.tasks, self.events.append, RecordingReport(), lambda: 7.0)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def scene() -> Scene:
    return Scene()


def begin(scene: Scene) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(scene.orders.rotate(Call()))


async def test_an_order_is_answered_when_it_is_carried_out(scene: Scene) -> None:
    order = begin(scene)
    await scene.settle()
    assert (scene.rotations.begun, order.done()) == (1, False)
    scene.rotations.outcome.set_result(Rotated(3, ("ns_chat@1_Worker",)))
    assert await order == {"processes": 3, "disconnected": ("ns_chat@1_Worker",)}
    assert [(event.kind, event.what) for event in scene.events] == [("secret", "the token of NATS was replaced")]
    assert scene.events[0].why == "3 processes took the new one within 0.0 s; disconnected: chat@1_Worker"


async def test_one_order_at_a_time_which_goes_on_when_nobody_waits_for_it(scene: Scene) -> None:
    order = begin(scene)
    await scene.settle()
    order.cancel()
    with pytest.raises(SupervisorError, match="replaced already"):
        await scene.orders.rotate(Call())
    assert scene.rotations.begun == 1
    scene.rotations.outcome.set_result(Rotated(3, ()))
    await scene.settle()
    assert scene.events[0].what == "the token of NATS was replaced"


async def test_whoever_waits_is_told_that_the_server_stops(scene: Scene) -> None:
    order = begin(scene)
    await scene.settle()
    await scene.tasks.close()
    with pytest.raises(SupervisorError, match="the server is stopping"):
        await order


async def test_a_failure_is_told_and_another_order_may_follow(scene: Scene) -> None:
    scene.rotations.outcome.set_exception(SupervisorError("the disk is full", "make room"))
    for _ in range(2):
        with pytest.raises(SupervisorError, match="the disk is full; make room"):
            await scene.orders.rotate(Call())
    assert {event.what for event in scene.events} == {"the token of NATS was not replaced"}


async def test_nats_of_others_keeps_its_token() -> None:
    orders = TokenOrders(None, TaskGuard(), lambda _: None, RecordingReport())
    with pytest.raises(SupervisorError, match="not started by this server"):
        await orders.rotate(Call())
