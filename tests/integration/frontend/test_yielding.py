"""An endpoint that yields its devices to another one: new requests are held, those that run go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.frontend.endpoint_scene import EndpointScene, endpoint_scene, listed, right, view
from tests.unit.frontend.asgi_driver import Answer

pytestmark = pytest.mark.integration

TAKES = listed("a@1", takes=True)
YIELDS = msgspec.structs.replace(TAKES, yields="yields its device to b: asked for 2.0 s ago")


@pytest.fixture
async def scene(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[EndpointScene]:
    async with endpoint_scene(connect, subjects, tmp_path, hold_timeout_s=60) as scene:
        yield scene


async def test_new_requests_are_held_and_running_ones_finish(scene: EndpointScene) -> None:
    scene.write_graph("a@1")
    await scene.mocker("a@1", "w", 300)
    ready = [view("a", "ready")]
    await scene.show(TAKES, endpoints=ready)
    fleet = await scene.watch_frontend("a@1")

    def in_flight() -> tuple[int | None, int]:
        counts = [one.counts for one in fleet.view.members() if one.role == "frontend" and one.counts is not None]
        return (counts[0].in_flight if counts else None), scene.served.table.held().get("a", 0)

    running = asyncio.create_task(scene.ask("a", (1, 2, 3), 200))
    await until(lambda: in_flight() == (1, 0))
    await scene.show(YIELDS, endpoints=ready)
    held = asyncio.create_task(scene.ask("a", (1, 2, 4)))
    await until(lambda: scene.served.table.held().get("a") == 1)
    assert tokens_of(await running) == right((1, 2, 3), 200, 300)
    assert not held.done()
    await scene.show(TAKES, endpoints=ready)
    assert tokens_of(await held) == right((1, 2, 4), 8, 300)


def tokens_of(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    found: list[int] = json.loads(answer.body)["tokens"]
    return found
