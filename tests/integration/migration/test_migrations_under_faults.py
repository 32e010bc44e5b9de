"""Moves among mockers while workers die, clients leave and requests end: every answer is right, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import RecoveryDeadlines, Survival
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, Reader, all_right, asking_for, nothing_left_at
from tests.integration.nats_process import NatsProcess
from tests.integration.workers.worker_parts import Worker, context_of

pytestmark = pytest.mark.integration

WORKERS = 3
STREAMS = 40
SMALL = replace(FAST, mocker_max_num_seqs=2)
MORTAL = replace(FAST, mocker_longest_pin_s=2.0)
"""A reader that dies does not say that it has read."""
CURIOUS = RecoveryDeadlines(silence_s=0.3, gap_s=0.1, ask_again_s=0.05, fruitless_epochs=50)
"""Of a frontend that asks soon after what was lost with the bus."""


class Fleet:
    """Mockers that can be killed; each that is killed is followed by another one."""

    def __init__(self, connect: Connect, subjects: Subjects, directory: Path) -> None:
        self._connect = connect
        self._subjects = subjects
        self._directory = directory
        self._started = 0
        self.workers: list[Worker] = []

    async def start(self, slot: int) -> None:
        self._started += 1
        context = context_of(await self._connect(), self._subjects, "VllmWorker", "aggregated", f"w{self._started}")
        context.announcer.update(watcher=f"{self._subjects.namespace}_slot{slot}")
        worker = Worker(context, MockerEngine(MORTAL, self._directory))
        self.workers.append(await worker.start())

    async def kill(self, worker: Worker, bus: Bus) -> None:
        """Kill the worker as SIGKILL does: it says nothing more. Another one is started."""
        self.workers.remove(worker)
        await worker.close()
        await worker.context.bus.close()
        await worker.engine.close(1.0)
        watcher = worker.context.announcer.presence.watcher
        heir = Presence(watcher, "VllmWorker", "aggregated", f"after {worker.lease}", 1, "starting")
        await bus.publish(self._subjects.presence(watcher, heir.role), codec.encode(heir))
        await self.start(int(watcher[-1]))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
            await worker.engine.close(1.0)


@pytest.fixture
async def fleet(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(connect, subjects, tmp_path)
    for slot in range(WORKERS):
        await fleet.start(slot)
    yield fleet
    await fleet.close()


def drawn(draw: random.Random, number: int) -> Request:
    tokens = draw.randint(100, 900)
    prompt = tuple(draw.choices(range(FAST.mocker_vocab_size), k=draw.randint(1, 300)))
    return request(f"r{number}", prompt, sampling=asking_for(tokens), max_tokens=tokens, survival=Survival())


async def knows_all(front: FakeFrontend) -> None:
    await until(lambda: len([p for p in front.fleet.view.routable() if p.engine is not None]) == WORKERS)


def migrate_some(front: FakeFrontend, draw: random.Random, share: float) -> None:
    """Orders migrations of some requests, wherever they may go."""
    for live in list(front.dispatcher.table.requests.values()):
        if draw.random() < share:
            front.dispatcher.migrations.order(live, None)


async def test_streams_that_migrate_all_the_time_bring_the_right_tokens(frontend: FakeFrontend, fleet: Fleet) -> None:
    draw = random.Random(1)
    await knows_all(frontend)
    asked = {one.request_id: one for one in (drawn(draw, number) for number in range(STREAMS))}
    reading = asyncio.create_task(Reader(frontend, asked).read())
    for one in asked.values():
        await frontend.dispatcher.submit(one)
    while not reading.done():
        migrate_some(frontend, draw, 0.1)
        await asyncio.sleep(draw.random() * 0.02)
    assert await reading == all_right(asked)
    assert frontend.dispatcher.migrations.statistics.outcomes["migrated", "hand"] > STREAMS
    await nothing_left_at(frontend, fleet.workers)


async def test_workers_that_die_in_the_middle_of_migrations_change_no_answer(
    frontend: FakeFrontend, fleet: Fleet, bus: Bus
) -> None:
    draw = random.Random(2)
    await knows_all(frontend)
    asked = {one.request_id: one for one in (drawn(draw, number) for number in range(STREAMS))}
    reading = asyncio.create_task(Reader(frontend, asked).read())
    for one in asked.values():
        await frontend.dispatcher.submit(one)
    for _ in range(6):
        for _ in range(3):
            migrate_some(frontend, draw, 0.3)
            await asyncio.sleep(draw.random() * 0.02)
        await fleet.kill(draw.choice(fleet.workers), bus)
    assert await reading == all_right(asked)
    assert frontend.dispatcher.migrations.statistics.outcomes.total() > 0
    await nothing_left_at(frontend, fleet.workers)


async def test_clients_that_leave_in_the_middle_of_migrations_leave_nothing_behind(
    frontend: FakeFrontend, fleet: Fleet
) -> None:
    draw = random.Random(3)
    await knows_all(frontend)
    asked = {one.request_id: one for one in (drawn(draw, number) for number in range(STREAMS))}
    stayed = dict(draw.sample(sorted(asked.items()), STREAMS // 2))
    leaving = [name for name in asked if name not in stayed]
    reading = asyncio.create_task(Reader(frontend, stayed).read())
    for one in asked.values():
        await frontend.dispatcher.submit(one)
    while leaving:
        migrate_some(frontend, draw, 0.5)
        await asyncio.sleep(draw.random() * 0.01)
        await frontend.dispatcher.cancel([leaving.pop()])
    assert await reading == all_right(stayed)
    await nothing_left_at(frontend, fleet.workers)


async def test_a_bus_that_is_away_for_a_while_changes_no_answer(
    own_nats: NatsProcess, subjects: Subjects, tmp_path: Path
) -> None:
    opened: list[Bus] = []

    async def connect() -> Bus:
        opened.append(await Bus.connect(own_nats.address, name=f"cut {len(opened)}"))
        return opened[-1]

    draw = random.Random(4)
    fleet = Fleet(connect, subjects, tmp_path)
    for slot in range(WORKERS):
        await fleet.start(slot)
    front = await FakeFrontend(await connect(), subjects, deadlines=CURIOUS).start()
    await knows_all(front)
    asked = {one.request_id: one for one in (drawn(draw, number) for number in range(STREAMS))}
    reading = asyncio.create_task(Reader(front, asked).read())
    for one in asked.values():
        await front.dispatcher.submit(one)
    for _ in range(2):
        migrate_some(front, draw, 0.5)
        await asyncio.sleep(draw.random() * 0.02)
        own_nats.kill()
        await asyncio.sleep(0.2)
        own_nats.start()
        await until(lambda: all(bus.connected for bus in opened))
    assert await reading == all_right(asked)
    await nothing_left_at(front, fleet.workers)
    await front.close()
    await fleet.close()
    for bus in opened:
        await bus.close()


async def test_a_destination_without_room_takes_nobody_in_and_streams_stay(
    frontend: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    source = Worker(
        context_of(await connect(), subjects, "VllmWorker", "aggregated", "a"), MockerEngine(FAST, tmp_path)
    )
    await source.start()
    await until(lambda: bool(frontend.fleet.view.routable()))
    asked = {one.request_id: one for one in (drawn(random.Random(n), n) for n in range(6))}
    for one in asked.values():
        await frontend.dispatcher.submit(one)
    reader = Reader(frontend, asked)
    await reader.read(lambda: all(reader.found.values()))
    small = Worker(
        context_of(await connect(), subjects, "VllmWorker", "aggregated", "b"), MockerEngine(SMALL, tmp_path)
    )
    await small.start()
    await until(lambda: len([p for p in frontend.fleet.view.routable() if p.engine is not None]) == 2)
    migrating = [
        frontend.dispatcher.migrations.order(live, "b") for live in list(frontend.dispatcher.table.requests.values())
    ]
    assert await reader.read() == all_right(asked)
    results = [(await each) for each in migrating]
    assert "as many requests run there as it can run" in {result.why for result in results}
    await nothing_left_at(frontend, [source])
    for worker in (source, small):
        await worker.close()
        await worker.engine.close(1.0)
