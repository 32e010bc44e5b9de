"""A worker that joins has in its cache what the others are asked for most, before anybody asks it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from components.workers.warming import LOOK_AGAIN_S
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.kv import KvChanges, PinAnswer, PinQuestion
from dynamo_local.core.messages.work import Cancel, RequestEpoch, Submit
from dynamo_local.core.routing.caches.index import pack_hashes, unpack
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.routing.router_scene import SAMPLING
from tests.integration.workers.worker_parts import Worker, context_of

pytestmark = pytest.mark.integration

BLOCK, POOL = 4, 800
SETTINGS = MockerSettings(mocker_block_size=BLOCK, mocker_kv_blocks=POOL, mocker_speedup=100.0)
HOT = list(range(1, 1 + 100 * BLOCK))
"""More blocks than one portion."""
COLD = list(range(5_000, 5_000 + 20 * BLOCK))

Start = Callable[..., Awaitable[Worker]]


class Caches:
    """The keys of the blocks that each worker has told to have stored."""

    def __init__(self) -> None:
        self.stored: dict[str, set[int]] = {}

    async def note(self, changes: KvChanges) -> None:
        self.stored.setdefault(changes.worker, set()).update(unpack(changes.stored))

    def have(self, lease: str, prompt: list[int], salt: str | None = None) -> bool:
        return keys(prompt, salt) <= self.stored.get(lease, set())


def keys(prompt: list[int], salt: str | None = None) -> set[int]:
    prefix = MockerEngine(SETTINGS).prefix([*prompt, 1], salt, None)
    assert prefix is not None
    return set(unpack(pack_hashes(prefix.hashes)))


@pytest.fixture
async def caches(bus: Bus, subjects: Subjects) -> Caches:
    caches = Caches()
    await bus.listen(subjects.kv_events_of_all, KvChanges, caches.note)
    await bus.flush()
    return caches


@pytest.fixture
async def start(connect: Connect, subjects: Subjects, tmp_path: Path, caches: Caches) -> AsyncIterator[Start]:
    async with AsyncExitStack() as ends:

        async def started(lease: str, settings: MockerSettings = SETTINGS) -> Worker:
            context = context_of(await connect(), subjects, "VllmWorker", "aggregated", lease)
            worker = Worker(context, MockerEngine(settings, tmp_path))
            ends.push_async_callback(worker.engine.close, 0.0)
            ends.push_async_callback(worker.close)
            await worker.start()
            await context.bus.flush()
            return worker

        yield started


@pytest.fixture
def ask(bus: Bus, subjects: Subjects, caches: Caches) -> Callable[..., Awaitable[None]]:
    """Have a worker compute prompts, one after another, as often as said."""
    numbers = itertools.count()

    async def asked(lease: str, prompt: list[int], times: int = 1, salt: str | None = None) -> None:
        for _ in range(times):
            work = Submit(f"r{next(numbers)}", 1, "f", [*prompt, 1], SAMPLING, cache_salt=salt)
            await bus.send(subjects.work(lease), work)
        await until(lambda: caches.have(lease, prompt, salt))

    return asked


async def test_a_new_worker_has_what_was_asked_for_twice_with_its_salt_and_nothing_else(
    start: Start, ask: Callable[..., Awaitable[None]], caches: Caches
) -> None:
    await start("old")
    await ask("old", HOT, 3)
    await ask("old", HOT[: 10 * BLOCK], 2, salt="theirs")
    await ask("old", COLD)
    new = await start("new")
    await until(lambda: caches.have("new", HOT) and caches.have("new", HOT[: 10 * BLOCK], "theirs"))
    assert caches.stored["new"] == keys(HOT) | keys(HOT[: 10 * BLOCK], "theirs")
    counts = new.context.announcer.presence.counts
    assert counts is not None
    assert (counts.requests, counts.prompt_tokens) == (0, 0), "warm requests are nobody's"


async def test_two_workers_counts_add_up_and_each_is_asked_for_what_it_has(
    start: Start, ask: Callable[..., Awaitable[None]], caches: Caches
) -> None:
    shared = HOT[: 8 * BLOCK]
    await start("one")
    other = await start("other")
    await warmed_up(other)
    await ask("one", [*shared, *COLD])
    await ask("other", [*shared, *HOT[50 * BLOCK :]])
    await start("new")
    await until(lambda: caches.have("new", shared))
    assert caches.stored["new"] == keys(shared), "what only one request had behind it is not hot"


async def test_its_share_of_the_cache_is_not_exceeded(
    start: Start, ask: Callable[..., Awaitable[None]], caches: Caches
) -> None:
    await start("old")
    prompts = [list(range(start_at, start_at + 100 * BLOCK)) for start_at in range(10_000, 16_000, 1_000)]
    for prompt in prompts:
        await ask("old", prompt, 2)
    new = await start("new")
    await warmed_up(new)
    assert POOL // 2 - 100 < new.service._kv_publisher.cached_blocks <= POOL // 2


async def test_it_does_not_compute_what_the_others_have_lost(
    start: Start, ask: Callable[..., Awaitable[None]], caches: Caches
) -> None:
    old = await start("old")
    await ask("old", HOT, 2)
    await old.service._engine.park(1.0)
    await old.service._engine.wake(1.0)
    new = await start("new")
    await warmed_up(new)
    assert new.service._kv_publisher.cached_blocks == 0


async def test_nothing_is_brought_while_requests_wait(
    start: Start, ask: Callable[..., Awaitable[None]], caches: Caches, bus: Bus, subjects: Subjects
) -> None:
    old = await start("old")
    await ask("old", HOT, 2)
    pinned: list[PinQuestion] = []
    pin = old.engine.pin

    async def noted(question: PinQuestion) -> PinAnswer:
        pinned.append(question)
        return await pin(question)

    old.engine.pin = noted  # type: ignore[method-assign]
    one_slot = replace(SETTINGS, mocker_max_num_seqs=1, mocker_speedup=1.0)
    new = await start("new", one_slot)
    endless = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1_000, "ignore_eos": True}))
    for number in range(2):
        await bus.send(subjects.work("new"), Submit(f"b{number}", 1, "f", [*COLD, number], endless))
    await until(lambda: (load := new.context.announcer.presence.load) is not None and load.waiting == 1)
    before = len(pinned)
    await asyncio.sleep(4 * LOOK_AGAIN_S)
    assert len(pinned) <= before + 1, "the one that was under way"
    await bus.send(subjects.work("new"), Cancel((RequestEpoch("b0", 1), RequestEpoch("b1", 1))))
    await until(lambda: caches.have("new", HOT))


async def warmed_up(worker: Worker) -> None:
    """Wait until all has been brought that is to be."""
    task = worker.service._warm_up._task
    assert task is not None
    await until(task.done)
