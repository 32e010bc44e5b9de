"""A worker publishes what it has cached; readers that join, miss messages and ask know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.codec import Message
from dynamo_local.core.messages.kv import KvChanges, KvStateQuestion
from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.ports import CacheChanges, Progress, Step
from dynamo_local.core.routing.caches.index import key_of, pack
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.workers.worker_parts import ScriptedEngine, Worker, context_of
from tests.kv_reader import KvReader

pytestmark = pytest.mark.integration

SAMPLING = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 4, "ignore_eos": True}))


@dataclass
class Listener:
    """Reads what the worker w publishes, except what it is told to miss."""

    bus: Bus
    subjects: Subjects
    messages: list[KvChanges] = field(default_factory=list)
    reader: KvReader = field(default_factory=KvReader)
    misses: int = 0

    async def start(self) -> Listener:
        await self.bus.listen(self.subjects.kv_events_of_all, KvChanges, self._on_changes)
        await self.bus.flush()
        return self

    async def ask(self) -> None:
        await self.bus.send(self.subjects.kv_state("w"), KvStateQuestion())

    async def _on_changes(self, message: KvChanges) -> None:
        if self.misses:
            self.misses -= 1
            return
        self.messages.append(message)
        self.reader.read(message)

    def repetitions(self) -> int:
        return sum(message.parts > 0 and message.part == 0 for message in self.messages)


@pytest.fixture
async def listener(connect: Connect, subjects: Subjects) -> Listener:
    return await Listener(await connect(), subjects).start()


class TellingEngine(ScriptedEngine):
    """Tells of its cache as a test says."""

    tells = True

    async def start(self, progress: Progress) -> EngineInfo:
        info = await super().start(progress)
        return msgspec.structs.replace(info, kv_events=self.tells)

    def changes(self, *stored: int, removed: tuple[int, ...] = (), cleared: bool = False) -> None:
        self.steps.put_nowait(Step(1.0, (), cache=CacheChanges(pack(removed), pack(stored), cleared)))


@pytest.fixture
def engine() -> TellingEngine:
    return TellingEngine()


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects, engine: TellingEngine) -> AsyncIterator[Worker]:
    worker = await Worker(context_of(await connect(), subjects, "VllmWorker", "aggregated", "w"), engine).start()
    await worker.context.bus.flush()
    yield worker
    await worker.close()


@pytest.mark.usefixtures("worker")
async def test_a_reader_that_asks_knows_all_and_then_what_changes(engine: TellingEngine, listener: Listener) -> None:
    await listener.ask()
    await until(lambda: listener.reader.number == 0)
    engine.changes(1, 2)
    engine.changes(3, removed=(1,))
    await until(lambda: listener.reader.keys == {2, 3})
    engine.changes(4, cleared=True)
    await until(lambda: listener.reader.keys == {4})
    assert listener.reader.number is not None


@pytest.mark.usefixtures("worker")
async def test_changes_of_many_steps_travel_together(engine: TellingEngine, listener: Listener) -> None:
    await listener.ask()
    for key in range(500):
        engine.changes(key)
    await until(lambda: listener.reader.keys == set(range(500)))
    assert len(listener.messages) < 50


@pytest.mark.usefixtures("worker")
async def test_a_lost_last_message_is_noticed_though_nothing_follows(engine: TellingEngine, listener: Listener) -> None:
    await listener.ask()
    await until(lambda: listener.reader.number == 0)
    listener.misses = 1
    engine.changes(1)
    await until(lambda: listener.reader.number is None)
    await listener.ask()
    await until(lambda: listener.reader.keys == {1})


@pytest.mark.usefixtures("worker")
async def test_one_repetition_serves_many_who_ask(listener: Listener) -> None:
    for _ in range(100):
        await listener.ask()
    await until(lambda: listener.repetitions() >= 1)
    await listener.bus.flush()
    assert listener.repetitions() < 20


@pytest.mark.usefixtures("worker")
async def test_what_cannot_be_sent_is_repeated(
    engine: TellingEngine, worker: Worker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = worker.context.bus.send, [1]

    async def fail_once(subject: str, message: Message) -> None:
        if isinstance(message, KvChanges) and failures:
            failures.pop()
            from dynamo_local.core.errors import BusError

            raise BusError("the buffer is full")
        await send(subject, message)

    monkeypatch.setattr(worker.context.bus, "send", fail_once)
    engine.changes(1, 2)
    await until(lambda: listener.reader.keys == {1, 2})


async def test_a_worker_whose_engine_does_not_tell_says_nothing(
    connect: Connect, subjects: Subjects, listener: Listener
) -> None:
    engine = TellingEngine()
    engine.tells = False
    worker = await Worker(context_of(await connect(), subjects, "VllmWorker", "aggregated", "w"), engine).start()
    await listener.ask()
    engine.changes(1)
    await until(engine.steps.empty)
    await worker.context.bus.flush()
    await listener.bus.flush()
    assert (listener.messages, worker.context.announcer.presence.engine.kv_events) == ([], False)  # type: ignore[union-attr]
    await worker.close()


async def test_a_mocker_s_cache_is_known_until_it_parks(
    connect: Connect, subjects: Subjects, listener: Listener
) -> None:
    engine = MockerEngine(MockerSettings(mocker_speedup=1000.0, mocker_block_size=4))
    worker = await Worker(context_of(await connect(), subjects, "VllmWorker", "aggregated", "w"), engine).start()
    await worker.context.bus.flush()
    prompt = list(range(18))
    await listener.ask()
    await listener.bus.send(subjects.work("w"), Submit("r", 1, "f", prompt, SAMPLING))
    prefix = engine.prefix(prompt, None, None)
    assert prefix is not None
    await until(lambda: {key_of(each) for each in prefix.hashes} < listener.reader.keys)
    assert len(prefix.hashes) == 4
    await until(lambda: not worker.service._outbox.running())
    async with asyncio.timeout(10.0):
        while (refused := await worker.service.parking.park(worker.service.why_busy)) is not None:
            assert "in use" in refused or "requests" in refused
    await until(lambda: listener.reader.keys == set())
    await worker.close()
