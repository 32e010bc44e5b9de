"""Orders to replace the token of NATS."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.rotation import RotateToken, RotationAnswer
from dynamo_local.supervisor.server.nats.rotation import Rotated, TokenRotation
from dynamo_local.supervisor.server.nats.token_orders import TokenOrders
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


async def test_an_order_that_is_sent_again_is_carried_out_once(scene: Scene) -> None:
    order = RotateToken("one")
    assert scene.orders.take(order) == scene.orders.take(order) == RotationAnswer()
    await scene.settle()
    assert scene.rotations.begun == 1
    scene.rotations.outcome.set_result(Rotated(3, ("ns_chat@1_Worker",)))
    await scene.settle()
    assert scene.orders.take(order) == RotationAnswer(True, 3, ("ns_chat@1_Worker",))
    assert [(event.kind, event.what) for event in scene.events] == [("secret", "the token of NATS was replaced")]
    assert scene.events[0].why == "3 processes took the new one within 0.0 s; disconnected: chat@1_Worker"
    await scene.tasks.close()


async def test_one_order_at_a_time(scene: Scene) -> None:
    scene.orders.take(RotateToken("one"))
    assert "replaced already" in scene.orders.take(RotateToken("two")).refused
    await scene.settle()
    assert scene.rotations.begun == 1
    await scene.tasks.close()


async def test_a_failure_is_told_and_another_order_may_follow(scene: Scene) -> None:
    scene.orders.take(RotateToken("one"))
    scene.rotations.outcome.set_exception(SupervisorError("the disk is full", "make room"))
    await scene.settle()
    assert scene.orders.take(RotateToken("one")) == RotationAnswer(refused="the disk is full", remedy="make room")
    assert scene.events[0].what == "the token of NATS was not replaced"
    assert scene.orders.take(RotateToken("two")) == RotationAnswer()
    await scene.tasks.close()


async def test_nats_of_others_keeps_its_token() -> None:
    orders = TokenOrders(None, TaskGuard(), lambda _: None, RecordingReport())
    assert "not started by this server" in orders.take(RotateToken("one")).refused
