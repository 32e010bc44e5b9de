"""The router's bookkeeping for the revisions of endpoints."""

from __future__ import annotations

import asyncio

import pytest

from components.router import router as routers
from components.router.model_routing import ModelRouting
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Charge, Charges, Released
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects, revision_in
from tests.integration.conftest import Connect
from tests.integration.server_process import PATIENCE_S
from tests.integration.workers.worker_parts import context_of, start_router

pytestmark = pytest.mark.integration


def worker(subjects: Subjects, revision: str, number: int) -> Presence:
    watcher = f"{subjects.namespace}_{revision}_VllmWorker_{number}"
    return Presence(watcher, "VllmWorker", "aggregated", f"{revision}-{number}", 1, "ready")


async def announced(bus: Bus, subjects: Subjects, revision: str, number: int) -> asyncio.Task[None]:
    announcer = Announcer(bus, Subjects(subjects.namespace, revision), worker(subjects, revision, number))
    task = asyncio.create_task(announcer.run())
    await announcer.announce()
    return task


async def test_each_revision_has_a_ledger_until_its_processes_are_gone(
    connect: Connect, bus: Bus, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(routers, "_FORGET_AFTER_S", 0.2)
    ended: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(ModelRouting, "stop", lambda routing: ended.put(revision_in(routing.subjects.assign)))
    workers = [await announced(bus, subjects, revision, n) for revision in ("chat@1", "embed@1") for n in (1, 2)]
    router = await start_router(context_of(await connect(), subjects, "Router", "router", "router"))

    async def ask(request: str, revision: str) -> str | None:
        subject = Subjects(subjects.namespace, revision).assign
        question = AssignRequest(request, "frontend", 100)
        return (await bus.ask(subject, question, Assignment, timeout_s=PATIENCE_S)).worker

    chat = Subjects(subjects.namespace, "chat@1")
    first, second = await ask("a", "chat@1"), await ask("b", "chat@1")
    assert {first, second} == {"chat@1-1", "chat@1-2"}
    assert await ask("a", "embed@1") in ("embed@1-1", "embed@1-2")
    # The one that is released is free again, whatever the other revision does.
    await bus.send(chat.account, Released("a", "frontend"))
    assert await ask("c", "chat@1") == first
    await bus.send(chat.account, Charges("frontend", (Charge("d", str(first), 1000),)))
    assert await ask("e", "chat@1") == second
    assert await ask("f", "chat@3") is None
    for task in workers:
        task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        assert {await ended.get() for _ in range(4)} == {FIRST_OF_MAIN, "chat@1", "embed@1", "chat@3"}
    await router.close()
