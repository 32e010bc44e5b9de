"""Requests go to the worker that has their prefix, as a frontend, a router and mocked engines agree about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from components.frontend.placing import RouterAssigner
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.messages.routing import Assignment
from dynamo_local.core.ports import Request
from dynamo_local.core.routing.caches.index import unpack
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, until
from tests.integration.workers.worker_parts import Part, Worker, context_of, start_router

pytestmark = pytest.mark.integration

BLOCK = 16
SETTINGS = MockerSettings(mocker_block_size=BLOCK, mocker_kv_blocks=256, mocker_step_base_ms=1.0)
PROMPT = tuple(range(1, 100))


def sampling(position: int, at_most: int | None = None) -> bytes:
    return msgspec.msgpack.encode({"max_tokens": 4 if at_most is None else at_most, "ignore_eos": True})


@dataclass
class Scene:
    """A frontend, a router, and the workers w1 and w2."""

    connect: Connect
    subjects: Subjects
    front: FakeFrontend
    router: Part
    workers: dict[str, Worker]
    heard: list[KvChanges]
    _asked: int = 0

    async def ask(self, prompt: tuple[int, ...] = PROMPT, salt: str | None = None) -> tuple[Assignment, int]:
        """Have a prompt answered. Returns how it was assigned, and the tokens that the worker had cached."""
        self._asked += 1
        name, cached = f"r{self._asked}", 0
        # That engines may look what they have cached is said by hashes; mocked engines make others.
        request = Request(name, prompt, sampling, 1.0, cache_salt=salt, hashes=lambda tokens, size: [])
        await self.front.dispatcher.submit(request)
        live = self.front.dispatcher.table.requests[name]
        async with asyncio.timeout(DEADLINE_S):
            finished = False
            while not finished:
                for delta in (await self.front.dispatcher.outputs()).deltas:
                    cached, finished = delta.cached_tokens or cached, delta.finish is not None
        assert live.assignment is not None
        return live.assignment, cached

    async def restart_router(self) -> None:
        """Have another one start, which has heard nothing."""
        await self.router.close()
        await self.router.context.bus.close()
        self.router = await start_router(context_of(await self.connect(), self.subjects, "Router", "router", "second"))


async def worker(connect: Connect, subjects: Subjects, lease: str) -> Worker:
    return await Worker(
        context_of(await connect(), subjects, "VllmWorker", "aggregated", lease), MockerEngine(SETTINGS)
    ).start()


@pytest.fixture
async def scene(connect: Connect, bus: Bus, subjects: Subjects) -> AsyncIterator[Scene]:
    heard: list[KvChanges] = []

    async def on_changes(changes: KvChanges) -> None:
        heard.append(changes)

    await bus.listen(subjects.kv_events_of_all, KvChanges, on_changes)
    await bus.flush()
    router = await start_router(context_of(await connect(), subjects, "Router", "router", "first"))
    workers = {lease: await worker(connect, subjects, lease) for lease in ("w1", "w2")}
    front = FakeFrontend(
        await connect(), subjects, assigner_of=lambda f, local: RouterAssigner(f.bus, f.subjects, f.lease, local)
    )
    await front.start()
    await until(lambda: len(front.fleet.view.routable()) == 2)
    scene = Scene(connect, subjects, front, router, workers, heard)
    yield scene
    await front.close()
    await scene.router.close()
    for each in workers.values():
        await each.close()


async def told(scene: Scene, worker: str | None, blocks: int) -> None:
    """Wait until a worker has told of so many blocks."""
    await until(lambda: sum(len(unpack(m.stored)) for m in scene.heard if m.worker == worker and not m.parts) >= blocks)


async def test_a_prompt_returns_to_the_worker_that_has_it_and_finds_there_what_was_predicted(scene: Scene) -> None:
    first, cached = await scene.ask()
    assert (first.cached, cached) == (0, 0)
    await told(scene, first.worker, len(PROMPT) // BLOCK)
    for _ in range(4):
        again, cached = await scene.ask()
        assert again.worker == first.worker
        assert again.cached == cached == len(PROMPT) // BLOCK * BLOCK


async def test_another_salt_is_another_prefix(scene: Scene) -> None:
    first, _ = await scene.ask()
    await told(scene, first.worker, len(PROMPT) // BLOCK)
    other, cached = await scene.ask(salt="other")
    assert (other.cached, cached) == (0, 0)
    same, cached = await scene.ask(salt="other")
    assert same.worker == other.worker


async def test_a_router_that_starts_learns_what_workers_have(scene: Scene) -> None:
    first, _ = await scene.ask()
    await told(scene, first.worker, len(PROMPT) // BLOCK)
    await scene.restart_router()
    # Until it has learnt it, any worker may be chosen: then both have the prompt.
    async with asyncio.timeout(DEADLINE_S):
        while (await scene.ask())[0].cached != len(PROMPT) // BLOCK * BLOCK:
            pass
    again, cached = await scene.ask()
    assert again.cached == cached == len(PROMPT) // BLOCK * BLOCK


async def test_requests_that_come_at_once_go_where_the_first_is_computed(scene: Scene) -> None:
    scene.front.dispatcher.table.placer.deadlines = scene.front.deadlines
    requests = [Request(f"b{n}", PROMPT, sampling, 1.0, hashes=lambda tokens, size: []) for n in range(3)]
    for request in requests:
        await scene.front.dispatcher.submit(request)
    lives = [scene.front.dispatcher.table.requests[request.request_id] for request in requests]
    await until(lambda: all(live.assignment is not None for live in lives))
    assert len({live.assignment.worker for live in lives if live.assignment is not None}) == 1


async def test_what_a_worker_had_is_forgotten_when_it_is_gone(scene: Scene) -> None:
    first, _ = await scene.ask()
    await told(scene, first.worker, len(PROMPT) // BLOCK)
    assert first.worker is not None
    gone = scene.workers.pop(first.worker)
    await gone.announce("failed")
    await gone.close()
    await until(lambda: len(scene.front.fleet.view.routable()) == 1)
    other, cached = await scene.ask()
    assert other.worker != first.worker
    # A router that has not heard of it yet names the one that is gone, and the frontend decides.
    assert (other.cached or 0, cached) == (0, 0)
