"""Requests that come before a worker is ready, or while the only one is replaced: held on a real bus, none refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.messages.endpoints import BoardRevision, ServedAdapter
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.frontend.endpoint_scene import (
    EndpointScene,
    endpoint_scene,
    listed,
    right,
    state_of,
    view,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def scene(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[EndpointScene]:
    async with endpoint_scene(connect, subjects, tmp_path, hold_timeout_s=60) as scene:
        yield scene


async def test_requests_from_before_the_first_worker_are_all_answered(scene: EndpointScene) -> None:
    """They come while the endpoint waits for a device, and go on through its start, the frontend's, and a worker's."""
    scene.write_graph("a@1", may_start=False)
    scene.write_graph("b@1")
    await scene.mocker("b@1", "other", 400)
    await scene.show(listed("b@1", takes=True), endpoints=[view("a", "waiting", "for a device"), view("b", "ready")])
    prompts = [(1, 2, number) for number in range(20)]
    asked = [asyncio.create_task(scene.tokens("a", prompt)) for prompt in prompts]
    await scene.held("a", 20)
    fleet = await scene.watch_frontend("a@1")
    starting = [view("a", "starting", "loading the model"), view("b", "ready")]
    await scene.show(listed("b@1", takes=True), listed("a@1", takes=True), endpoints=starting)
    await until(lambda: state_of(fleet) == ("starting", 20))
    scene.may_start["a@1"].set()
    await until(lambda: state_of(fleet) == ("ready", 20))
    assert not any(each.done() for each in asked)
    assert (await scene.health()).status == 200, "the other one answers"
    await scene.mocker("a@1", "w", 300)
    assert await asyncio.gather(*asked) == [right(prompt, 8, 300) for prompt in prompts]
    await until(lambda: state_of(fleet) == ("ready", 0))


async def test_requests_for_an_adapter_wait_until_its_base_has_room(scene: EndpointScene) -> None:
    for revision, vocabulary in (("a@1", 300), ("a@2", 400)):
        scene.write_graph(revision)
        await scene.mocker(revision, f"w-{revision}", vocabulary)
    ready = view("a", "ready")
    # Another one, since a single model is asked for every name.
    other = view("b", "asleep")
    await scene.show(listed("a@1", takes=True), endpoints=[ready, other])
    assert (await scene.ask("pirate")).status == 404
    rolled = view("pirate", "starting", "a is rolled", adapter_of="a")
    second = BoardRevision("a@2", False, ("a",), (ServedAdapter("pirate", "/p", "7.1"),))
    await scene.show(listed("a@1", takes=True), second, endpoints=[ready, other, rolled])
    prompts = [(1, 2, number) for number in range(5)]
    asked = [asyncio.create_task(scene.tokens("pirate", prompt)) for prompt in prompts]
    await scene.held("pirate", 5)
    assert await scene.tokens("a", (1,)) == right((1,), 8, 300)
    await until(lambda: "a@2" in scene.applications and scene.applications["a@2"].adapters == {"pirate": "/p"})
    served = view("pirate", "ready", adapter_of="a")
    await scene.show(
        listed("a@1", takes=False),
        msgspec.structs.replace(second, takes_requests=True),
        endpoints=[ready, other, served],
    )
    assert await asyncio.gather(*asked) == [right(prompt, 8, 400) for prompt in prompts]

    # Another version of it is asked for by nobody before the application has it.
    scene.applications["a@2"].may_serve.clear()
    third = BoardRevision("a@2", True, ("a",), (ServedAdapter("pirate", "/p", "8.1"),))
    await scene.show(third, endpoints=[ready, other, served])
    waits = asyncio.create_task(scene.tokens("pirate", (1,)))
    await scene.held("pirate", 1)
    scene.applications["a@2"].may_serve.set()
    assert await waits == right((1,), 8, 400)
    await scene.show(listed("a@2", takes=True), endpoints=[ready, other])
    await until(lambda: scene.applications["a@2"].adapters == {})
    assert (await scene.ask("pirate")).status == 404


async def test_new_requests_outlast_the_death_of_the_only_worker(scene: EndpointScene) -> None:
    scene.write_graph("a@1")
    first = await scene.mocker("a@1", "w1", 300)
    await scene.show(listed("a@1", takes=True), endpoints=[view("a", "ready")])
    stop = asyncio.Event()
    answered = 0

    async def keep_asking(prompt: tuple[int, ...]) -> None:
        nonlocal answered
        while not stop.is_set():
            assert await scene.tokens("a", prompt) == right(prompt, 8, 300)
            answered += 1

    asking = [asyncio.create_task(keep_asking((1, 2, number))) for number in range(4)]
    await until(lambda: answered > 4)
    await first.announce("failed")
    model = next(iter(scene.served.models))
    await until(lambda: not model.fleet.view.ready())
    late = [asyncio.create_task(scene.tokens("a", (7, number))) for number in range(4)]
    await until(lambda: scene.served.table.held().get("a", 0) >= 4)
    await scene.mocker("a@1", "w2", 300)
    assert await asyncio.gather(*late) == [right((7, number), 8, 300) for number in range(4)]
    stop.set()
    await asyncio.gather(*asking)


async def test_a_start_that_fails_and_a_server_that_stops_answer_all_who_wait(scene: EndpointScene) -> None:
    await scene.show(endpoints=[view("a", "fetching", "1 of 2 GB"), view("b", "starting")])
    asked = [asyncio.create_task(scene.ask("a")) for _ in range(5)]
    await scene.held("a", 5)
    await scene.show(endpoints=[view("a", "failed", "no such model"), view("b", "starting")])
    for each in asked:
        answer = await each
        assert (answer.status, answer.error["message"]) == (503, "endpoint a is failed: no such model")
    await scene.show(endpoints=[view("a", "starting"), view("b", "starting")])
    asked = [asyncio.create_task(scene.ask("a")) for _ in range(5)]
    await scene.held("a", 5)
    scene.draining = True
    scene.served.table.wake()
    assert {(await each).error["message"] for each in asked} == {"the server is shutting down"}


async def test_a_model_that_cannot_be_built_here_is_not_waited_for(scene: EndpointScene) -> None:
    scene.write_graph("a@1", model="broken", may_start=False)
    await scene.show(listed("a@1", takes=True))
    asked = asyncio.create_task(scene.ask("a"))
    await scene.held("a", 1)
    scene.may_start["a@1"].set()
    answer = await asked
    assert (answer.status, answer.error["message"]) == (503, "no such model; choose another")
