"""What is shown of a server with endpoints, over a real bus: processes announce themselves in two revisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer, FleetWatch
from dynamo_local.control.answers import WatcherRow
from dynamo_local.control.descriptions import FleetLook
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.admin import AdminRequest, MigrationOrder, RequestLine, RequestsAnswer
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.names import Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.top import TopSession
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.requests import AskedFrontends, Scope
from dynamo_local.tasks import TaskGuard
from state.paths import StatePaths
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, NO_PROCESS, until

pytestmark = pytest.mark.integration

CHAT = EndpointView(
    EndpointSpec(name="chat", model="m", disaggregated=True), EndpointStatus("updating", wanted=1, ready=1), 1.0, 2.0
)
BOARD = Board(1, (BoardRevision("chat@1", True, ("chat",)), BoardRevision("chat@2", False, ("chat",))), (CHAT,))
ENGINE = EngineInfo("mocker", "chat", 512, 16, 64, 8)


def presence(subjects: Subjects, service: str, role: str, revision: str = "") -> Presence:
    watcher = str(Watcher(subjects.namespace, service, revision=revision))
    engine, load = (ENGINE, Load(2, 1, 0.5)) if revision else (None, None)
    lease = f"lease of {watcher}"
    return Presence(watcher, service, role, lease, NO_PROCESS, "ready", engine=engine, load=load, revision=revision)


@pytest.fixture
async def announced(connect: Connect, subjects: Subjects) -> AsyncIterator[set[str]]:
    """Workers of two revisions of an endpoint, and a frontend that serves both. Yields all watchers."""
    tasks, bus = TaskGuard(), await connect()
    old, new = (Subjects(subjects.namespace, revision) for revision in ("chat@1", "chat@2"))
    frontend = presence(subjects, "Frontend", "frontend")
    found: list[tuple[Subjects, Presence]] = [
        (subjects, frontend),
        (new, replace(frontend, state="starting", detail="building", counts=Counts(in_flight=3))),
        (old, presence(subjects, "VllmWorker", "decode", "chat@1")),
        (new, presence(subjects, "VllmWorker", "decode", "chat@2")),
        (new, presence(subjects, "PrefillWorker", "prefill", "chat@2")),
    ]
    for where, what in found:
        tasks.spawn(f"{what.watcher} {where.revision}", Announcer(bus, where, what).run())
    await bus.flush()
    yield {what.watcher for _, what in found}
    await tasks.close()


async def test_top_shows_workers_and_the_queue_of_an_endpoint(
    announced: set[str], bus: Bus, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    scope = Subjects(subjects.namespace, "chat@2")
    await create_prefill_queue(bus, scope)
    await PrefillQueue(bus, scope).publish(PrefillJob("j", "r", "f", 3, DEADLINE_S))
    asking = await connect()
    watch = FleetWatch(asking, subjects, everywhere=True)
    asked = AskedServer(StatePaths(tmp_path, subjects.namespace), *cast("Any", (None, None, None)))
    await asked.follow(asking, watch, cast("Any", None))
    await watch.start()
    loop = asyncio.get_running_loop()

    def look() -> FleetLook:
        return asyncio.run_coroutine_threadsafe(asked.look(), loop).result(DEADLINE_S)

    session = TopSession(subjects.namespace, look, board=lambda: BOARD)
    await session.start()

    def is_complete() -> bool:
        view = session.view()
        shown = {row.watcher for row in view.workers} | {row.watcher for row in view.processes}
        return shown == announced and view.endpoints[0].queue == QueueLength(1, 0)

    await until(is_complete)
    view = session.view()
    assert {row.revision for row in view.workers} == {"chat@1", "chat@2"}
    assert {row.state for row in view.processes} == {"ready"}
    (chat,) = view.endpoints
    assert (chat.revision, chat.ready, chat.kv_usage) == ("chat@1", 1, 0.5)
    await session.close()


def row(watcher: str, state: str = "ready") -> WatcherRow:
    return WatcherRow(watcher=watcher, component="F", role="frontend", pid=1, devices=(), state=state, lease=watcher)


async def test_frontends_are_asked_for_each_revision_that_they_serve(
    bus: Bus, connect: Connect, subjects: Subjects
) -> None:
    serving = await connect()
    request = RequestLine(request="cmpl-1", epoch=1, worker="w", prompt_tokens=5, tokens=3, age_s=1.0)

    async def on_question(question: AdminRequest) -> RequestsAnswer:
        assert not isinstance(question, MigrationOrder)
        return RequestsAnswer((request,), 4)

    first, second = (f"{subjects.namespace}_{name}" for name in ("Frontend", "Frontend_1"))
    for scope, lease in (("chat@2", first), ("", second), ("chat@2", second)):
        await serving.serve(Subjects(subjects.namespace, scope).requests(lease), AdminRequest, on_question)
    await serving.flush()
    asked = AskedFrontends(bus, subjects.namespace, [row(first), row(second)], ["", "chat@1", "chat@2"])
    found = await asyncio.wait_for(asked.requests(10), DEADLINE_S)
    assert found.keys() == {Scope(first, "chat@2"), Scope(second, ""), Scope(second, "chat@2")}
    assert all(answer == RequestsAnswer((request,), 4) for answer in found.values())


async def test_a_frontend_that_is_not_ready_and_answers_nowhere_is_an_error(bus: Bus, subjects: Subjects) -> None:
    name = f"{subjects.namespace}_Frontend"
    with pytest.raises(BusError, match="Frontend does not answer"):
        await AskedFrontends(bus, subjects.namespace, [row(name, "silent")], ["", "chat@1"]).requests(10)
    # One that is ready may serve nothing yet.
    assert await AskedFrontends(bus, subjects.namespace, [row(name)], ["", "chat@1"]).requests(10) == {}
