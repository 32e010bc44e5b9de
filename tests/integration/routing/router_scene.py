"""Workers that tell what they have cached, and a router that is asked as a frontend asks it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Released
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.routing.caches.index import pack_hashes
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from tests.integration.fleet_of_fakes import DEADLINE_S
from tests.integration.workers.worker_parts import Part, Worker, context_of, start_router

BLOCK = 4
SAMPLING = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "ignore_eos": True}))


def mocker() -> MockerEngine:
    return MockerEngine(MockerSettings(mocker_speedup=1000.0, mocker_block_size=BLOCK))


@asynccontextmanager
async def running_worker(bus: Bus, subjects: Subjects, lease: str) -> AsyncIterator[Worker]:
    """A worker with a mocker, until the end of the block."""
    worker = await Worker(context_of(bus, subjects, "VllmWorker", "aggregated", lease), mocker()).start()
    await bus.flush()
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def running_router(bus: Bus, subjects: Subjects) -> AsyncIterator[Part]:
    """A router, until the end of the block."""
    router = await start_router(context_of(bus, subjects, "Router", "router", "router"))
    try:
        yield router
    finally:
        await router.close()


def counts_of(router: Part) -> Counts:
    counts = router.context.announcer.presence.counts
    assert counts is not None
    return counts


@dataclass
class Asker:
    """A frontend, as far as the router and workers see it. Prompts are asked for in the namespace's own model, unless
    the subjects are those of a revision."""

    bus: Bus
    subjects: Subjects
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    block_size: int = BLOCK

    async def ask(self, prompt: list[int], *, release: bool = True) -> Assignment:
        """Ask for a worker. `release`: the request is no load afterwards."""
        request_id = str(next(self.numbers))
        engine = mocker()
        prefix = engine.prefix(prompt, None, None)
        blocks = b"" if prefix is None else pack_hashes(prefix.hashes)
        question = AssignRequest(request_id, "f", len(prompt), blocks=blocks, block_tokens=self.block_size)
        found = await self.bus.ask(self.subjects.assign, question, Assignment, timeout_s=DEADLINE_S)
        if release:
            await self.bus.send(self.subjects.account, Released(request_id, "f"))
        return found

    async def submit(self, lease: str, prompt: list[int]) -> None:
        """Have a worker compute the prompt."""
        await self.bus.send(self.subjects.work(lease), Submit(str(next(self.numbers)), 1, "f", prompt, SAMPLING))
