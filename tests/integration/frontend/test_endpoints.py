"""Endpoints in one frontend: each request goes to the model that it asks for, through updates, failures and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.endpoints import BoardRevision
from dynamo_local.core.messages.presence import Counts, EndedMigrations, MigrationCounts
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, until
from tests.integration.frontend.endpoint_scene import (
    EndpointScene,
    announced,
    endpoint_scene,
    listed,
    right,
    state_of,
    view,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def scene(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[EndpointScene]:
    async with endpoint_scene(connect, subjects, tmp_path) as scene:
        yield scene


async def ready(scene: EndpointScene, *names: str) -> None:
    for name in names:
        await until(lambda name=name: _can_answer(scene, name))  # type: ignore[misc]


def _can_answer(scene: EndpointScene, name: str) -> bool:
    entry = scene.served.table.find(name)
    return getattr(entry, "names", [""])[0] == name and entry.why_not() is None  # type: ignore[union-attr]


async def test_two_models_built_under_traffic_never_get_each_others_tokens(scene: EndpointScene) -> None:
    for revision, vocabulary in (("a@1", 300), ("b@1", 400), ("c@1", 500)):
        scene.write_graph(revision, may_start=revision == "a@1")
        await scene.mocker(revision, f"w-{revision[0]}", vocabulary)
    await scene.show(listed("a@1", takes=True))
    await ready(scene, "a")
    stop = asyncio.Event()
    answered = 0

    async def keep_asking(prompt: tuple[int, ...]) -> None:
        nonlocal answered
        while not stop.is_set():
            assert await scene.tokens("a", prompt) == right(prompt, 8, 300)
            answered += 1

    asking = [asyncio.create_task(keep_asking((1, 2, number))) for number in range(4)]
    await scene.show(*(listed(f"{name}@1", takes=True) for name in "abc"))
    assert (await scene.ask("b")).status == 503
    scene.may_start["b@1"].set()
    scene.may_start["c@1"].set()
    await ready(scene, "b", "c")
    before = answered
    await until(lambda: answered > before + 4)
    prompts = [(7, 8, number) for number in range(10)]
    answers = await asyncio.gather(*(scene.tokens(name, prompt) for prompt in prompts for name in "bc"))
    stop.set()
    await asyncio.gather(*asking)
    assert answers == [right(prompt, 8, size) for prompt in prompts for size in (400, 500)]


async def test_an_update_flips_under_traffic_and_no_request_fails(scene: EndpointScene) -> None:
    scene.write_graph("a@1")
    scene.write_graph("a@2", may_start=False)
    await scene.mocker("a@1", "old", 300)
    await scene.mocker("a@2", "new", 400)
    old, new = await scene.watch_frontend("a@1"), await scene.watch_frontend("a@2")
    await scene.show(listed("a@1", takes=True))
    await ready(scene, "a")
    stop = asyncio.Event()
    seen: list[int] = []

    async def keep_asking(prompt: tuple[int, ...]) -> None:
        while not stop.is_set():
            found = await scene.tokens("a", prompt)
            (vocabulary,) = (size for size in (300, 400) if found == right(prompt, 8, size))
            seen.append(vocabulary)

    asking = [asyncio.create_task(keep_asking((1, 2, number))) for number in range(4)]
    await scene.show(listed("a@1", takes=True), listed("a@2", takes=False))
    await until(lambda: state_of(new) == ("starting", 0))
    assert (await until_detail(new)) == "loading the tokenizer"
    scene.may_start["a@2"].set()
    await until(lambda: state_of(new) == ("ready", 0))
    # One that is admitted before the flip finishes where it is.
    long = asyncio.create_task(scene.tokens("a", (9, 9, 9), 3000))
    await until(lambda: (state_of(old) or ("", 0))[1] == 5)
    await scene.show(listed("a@1", takes=False), listed("a@2", takes=True))
    flipped = len(seen)
    await until(lambda: seen[flipped:].count(400) > 8)
    assert (state_of(old) or ("", 0))[0] == "draining"
    assert await long == right((9, 9, 9), 3000, 300)
    await until(lambda: state_of(old) == ("draining", 0))
    # After the flip, those under way at that time may still be the old one's; then none is.
    assert 300 not in seen[flipped + 4 :]
    await scene.show(listed("a@2", takes=True))
    await until(lambda: scene.applications["a@1"].closed)
    stop.set()
    await asyncio.gather(*asking)
    assert await scene.tokens("a", (5,)) == right((5,), 8, 400)


async def until_detail(fleet: object) -> str:
    await until(lambda: bool((found := announced(fleet)) and found.detail))  # type: ignore[arg-type]
    found = announced(fleet)  # type: ignore[arg-type]
    return "" if found is None else found.detail


async def test_a_model_that_cannot_be_built_is_told_and_disturbs_no_other(scene: EndpointScene) -> None:
    scene.write_graph("good@1")
    scene.write_graph("bad@1", model="broken")
    await scene.mocker("good@1", "w", 300)
    fleet = await scene.watch_frontend("bad@1")
    views = [view("bad", "starting", "its frontend starts")]
    await scene.show(listed("good@1", takes=True), listed("bad@1", takes=False), endpoints=views)
    await until(lambda: (state_of(fleet) or ("", 0))[0] == "failed")
    assert (found := announced(fleet)) is not None
    assert found.detail == "no such model; choose another"
    await ready(scene, "good")
    assert await scene.tokens("good", (1,)) == right((1,), 8, 300)
    refused = await scene.ask("bad")
    assert (refused.status, refused.error["message"]) == (503, "endpoint bad is starting: its frontend starts")
    assert refused.headers["retry-after"]
    # Its graph is missing altogether.
    missing = await scene.watch_frontend("none@1")
    await scene.show(listed("good@1", takes=True), listed("none@1", takes=True))
    await until(lambda: (state_of(missing) or ("", 0))[0] == "failed")
    assert (await scene.ask("none")).error["message"].startswith("the graph of none@1 cannot be read")
    assert await scene.tokens("good", (1,)) == right((1,), 8, 300)


async def test_an_endpoint_that_is_deleted_while_it_answers_ends_each_request_with_a_line(scene: EndpointScene) -> None:
    for name in "ab":
        scene.write_graph(f"{name}@1")
    worker = await scene.mocker("a@1", "w", 300)
    await scene.mocker("b@1", "v", 400)
    await scene.show(listed("a@1", takes=True), listed("b@1", takes=True))
    await ready(scene, "a", "b")
    other = asyncio.create_task(scene.tokens("b", (1, 2), 2000))
    asked = asyncio.create_task(scene.ask("a", (1,), 1_000_000))
    await until(lambda: bool(worker.context.announcer.presence.load and worker.context.announcer.presence.load.running))
    await scene.show(listed("b@1", takes=True))
    answer = await asked
    assert (answer.status, json.loads(answer.body)["error"]) == (503, "endpoint a serves this model no more")
    await until(lambda: scene.applications["a@1"].closed)
    # The workers forget the request as well.
    await until(lambda: not worker.context.announcer.presence.load.running)  # type: ignore[union-attr]
    assert await other == right((1, 2), 2000, 400)
    # A single model is meant by requests that name none, and by no other's name.
    assert await scene.tokens(None, (1,)) == right((1,), 8, 400)
    assert (await scene.ask("a", (1,))).error["param"] == "model"


async def test_requests_are_refused_with_what_is_wrong(scene: EndpointScene) -> None:
    assert (await scene.health()).status == 200
    assert (await scene.ask("a")).status == 404
    assert (await scene.ask(None)).status == 400
    await scene.show(endpoints=[view("a", "waiting", "for a device"), view("b", "fetching", "12 of 40 GB")])
    refused = await scene.ask("b")
    assert (refused.status, refused.error["message"]) == (503, "endpoint b is fetching: 12 of 40 GB")
    assert (await scene.ask(None)).error["message"] == "the request names no model; there are: a, b"
    assert (await scene.ask("c")).error == {
        "message": "The model `c` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    health = await scene.health()
    assert (health.status, "a: endpoint a is waiting: for a device" in health.error["message"]) == (503, True)
    cards = {card["id"]: card["status"] for card in await scene.served.table.cards()}
    assert cards["b"] == {"state": "fetching", "reason": "12 of 40 GB"}


async def test_adapters_are_models_of_their_base(scene: EndpointScene) -> None:
    for name in "ab":
        scene.write_graph(f"{name}@1")
    await scene.mocker("a@1", "w", 300)
    await scene.mocker("b@1", "v", 400)
    await scene.show(listed("a@1", takes=True, adapters={"pirate": "/p"}), listed("b@1", takes=True))
    await ready(scene, "a", "b")
    await until(lambda: scene.applications["a@1"].adapters == {"pirate": "/p"})
    assert await scene.tokens("pirate", (1,)) == right((1,), 8, 300)
    assert [card["id"] for card in await scene.served.table.cards()] == ["a", "pirate", "b"]
    await scene.show(listed("a@1", takes=True), listed("b@1", takes=True, adapters={"pirate": "/q"}))
    await until(lambda: scene.applications["b@1"].adapters == {"pirate": "/q"})
    await until(lambda: [entry.names for entry in scene.served.table.entries] == [("a",), ("b", "pirate")])
    assert await scene.tokens("pirate", (1,)) == right((1,), 8, 400)


async def test_a_frontend_that_comes_late_does_not_build_what_ends(scene: EndpointScene) -> None:
    for revision in ("a@1", "a@2"):
        scene.write_graph(revision)
    old = await scene.watch_frontend("a@1")
    await scene.show(listed("a@1", takes=False), listed("a@2", takes=True))
    await until(lambda: state_of(old) == ("draining", 0))
    await until(lambda: "a@2" in scene.applications)
    assert "a@1" not in scene.applications


async def test_a_damaged_board_changes_nothing(scene: EndpointScene, caplog: pytest.LogCaptureFixture) -> None:
    scene.write_graph("a@1")
    await scene.mocker("a@1", "w", 300)
    await scene.show(listed("a@1", takes=True))
    await ready(scene, "a")
    scene.paths.board_file.write_bytes(b'{"number": 7, "revi')
    scene.watch._read()
    assert "the board of endpoints is damaged" in caplog.text
    assert await scene.tokens("a", (1,)) == right((1,), 8, 300)


# The model that a graph has itself


async def test_main_is_awaited_on_the_board_and_until_it_is_built(scene: EndpointScene) -> None:
    scene.write_graph(FIRST_OF_MAIN, may_start=False)
    progress: list[str] = []
    waiting = asyncio.create_task(scene.served.main_is_built(progress.append))
    scene.write_graph("a@1")
    await scene.show(listed("a@1", takes=True))
    assert not waiting.done()
    await scene.show(BoardRevision(FIRST_OF_MAIN, True, ("m", "second")), listed("a@1", takes=True))
    await until(lambda: progress == ["loading the tokenizer"])
    scene.may_start[FIRST_OF_MAIN].set()
    await waiting
    await scene.mocker(FIRST_OF_MAIN, "w", 300)
    await ready(scene, "m")
    for name in ("m", "second"):
        assert await scene.tokens(name, (1, 2, 3)) == right((1, 2, 3), 8, 300)


async def test_a_frontend_whose_main_cannot_be_built_fails_with_the_reason(scene: EndpointScene) -> None:
    scene.write_graph(FIRST_OF_MAIN, model="broken")
    await scene.show(BoardRevision(FIRST_OF_MAIN, True, ("m",)))
    with pytest.raises(EngineError, match="no such model"):
        await scene.served.main_is_built(lambda _: None)


async def test_a_frontend_that_ends_waits_for_no_model_that_is_being_built(scene: EndpointScene) -> None:
    scene.write_graph("a@1", may_start=False)
    await scene.show(listed("a@1", takes=True))
    await until(lambda: "a@1" in scene.applications)
    async with asyncio.timeout(DEADLINE_S):
        await scene.served.close()


async def test_migrations_of_what_is_given_up_still_count(scene: EndpointScene) -> None:
    told: list[Counts] = []
    scene.served.on_counts = told.append
    scene.write_graph("a@1")
    scene.write_graph("b@1")
    both = listed("a@1", takes=True), listed("b@1", takes=True)
    await scene.show(*both)
    await until(lambda: len(list(scene.served.models)) == 2)
    first = next(iter(scene.served.models))
    first._on_migrations(MigrationCounts((EndedMigrations("hand", "migrated", 2),)))
    await scene.show(both[1])
    (second,) = scene.served.models
    second._on_migrations(MigrationCounts((EndedMigrations("hand", "migrated", 1),)))
    assert told[-1].migrations is not None
    assert told[-1].migrations.completed == 3
