"""Orders that come over the bus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.supervisor.places.messages import PlacesQuestion, Refused
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.places.service import PlacesService
from dynamo_local.tasks import TaskGuard


class BrokenPlaces:
    async def places(self) -> None:
        raise KeyError("nobody has thought of this")


class Asked:
    """A bus that asks one question, and its answer."""

    def __init__(self) -> None:
        self.answers: list[msgspec.Struct] = []

    async def serve(
        self, subject: str, kind: object, handler: Callable[[msgspec.Struct, Asked], Awaitable[None]]
    ) -> None:
        await handler(PlacesQuestion(), self)

    async def send(self, message: msgspec.Struct) -> None:
        self.answers.append(message)


async def test_an_order_that_fails_in_a_new_way_is_refused_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tasks, bus = TaskGuard(), Asked()
    failures: list[BaseException] = []
    tasks.on_failure(failures.append)
    await PlacesService(cast(Places, BrokenPlaces()), tasks, cast(Any, None)).serve(cast(Bus, bus), "places")
    (order,) = tasks._tasks
    await order
    (answer,) = bus.answers
    assert isinstance(answer, Refused)
    assert "KeyError: 'nobody has thought of this'" in answer.cause
    assert failures == []
    assert "an order has failed: PlacesQuestion" in caplog.text
