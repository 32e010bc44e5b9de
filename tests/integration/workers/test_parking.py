"""Parking and waking a worker: what it announces, what keeps it from parking, and requests that come at any moment."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from components.workers.roles import ParkingOrders, Roles
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.prefill_queue import create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_WORKERS
from dynamo_local.core.errors import EngineError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import Exclusive, Load, Presence
from dynamo_local.core.messages.work import (
    AskExclusive,
    Cancel,
    CancelReservation,
    MigrationAnswer,
    RequestEpoch,
    Reserve,
    Submit,
    TokenBatch,
    TokenDelta,
)
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.ports import Engine, Prefix, Step
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation
from state.machine.identity import machine_id
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, until
from tests.integration.server_process import ServerProcess, eventually
from tests.integration.workers.worker_parts import PrefillPart, ScriptedEngine, context_of

pytestmark = pytest.mark.integration

FAST = MockerSettings(mocker_speedup=1000.0)
SAMPLING = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 4, "ignore_eos": True}))
PARKED = ParkAnswer(parked=True)
AWAKE = ParkAnswer(parked=False)


@dataclass
class Parkable(PrefillPart):
    """A worker that obeys orders to park, and to change its role."""

    parking: ParkingOrders = field(init=False)

    async def start(self) -> Parkable:
        await super().start()
        parking = self.service.parking
        self.roles = Roles(self.context, self.prefill, lambda: parking.resting)
        self.parking = ParkingOrders(self.context, parking, self.service.why_busy, self.roles, self.prefill)
        await self.roles.start()
        await self.parking.start()
        await self.context.bus.flush()
        return self

    @property
    def presence(self) -> Presence:
        return self.context.announcer.presence

    @property
    def usage(self) -> tuple[float | None, float | None] | None:
        """Used and pinned shares of the KV cache, as announced."""
        load = self.presence.load
        return None if load is None else (load.kv_usage, load.kv_pinned)

    def takes_jobs(self) -> bool:
        return self.prefill.is_on


@dataclass
class Asker:
    """A server that orders, and a frontend that submits, in one."""

    bus: Bus
    subjects: Subjects
    tokens: defaultdict[str, list[TokenDelta]] = field(default_factory=lambda: defaultdict(list))

    async def start(self) -> Asker:
        await self.bus.listen(self.subjects.tokens("f"), TokenBatch, self._on_tokens)
        await self.bus.flush()
        return self

    async def park(self) -> ParkAnswer:
        return await self.order(parked=True)

    async def wake(self) -> ParkAnswer:
        return await self.order(parked=False)

    async def order(self, *, parked: bool) -> ParkAnswer:
        return await self.bus.ask(self.subjects.parking("w"), ParkQuestion(parked), ParkAnswer, timeout_s=DEADLINE_S)

    async def submit(self, request_id: str, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        work = Submit(request_id, 1, "f", list(prompt), SAMPLING, arrival_time=1.0)
        await self.bus.send(self.subjects.work("w"), work)

    async def forget(self, request_id: str) -> None:
        await self.bus.send(self.subjects.work("w"), Cancel((RequestEpoch(request_id, 1),)))

    def finished(self, request_id: str) -> bool:
        return bool(self.tokens[request_id]) and self.tokens[request_id][-1].finish is not None

    def answer(self, request_id: str) -> list[int]:
        return [token for delta in self.tokens[request_id] for token in delta.token_ids]

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            self.tokens[delta.request_id].append(delta)


@pytest.fixture
async def asker(bus: Bus, subjects: Subjects) -> Asker:
    return await Asker(bus, subjects).start()


async def parkable(connect: Connect, subjects: Subjects, engine: Engine, role: str = "aggregated") -> Parkable:
    return await Parkable(context_of(await connect(), subjects, "VllmWorker", role, "w"), engine).start()


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects) -> AsyncIterator[Parkable]:
    """With the mocker."""
    worker = await parkable(connect, subjects, MockerEngine(FAST))
    yield worker
    await worker.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def scripted(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> AsyncIterator[Parkable]:
    worker = await parkable(connect, subjects, engine)
    yield worker
    await worker.close()


async def test_a_parked_worker_is_alive_and_gets_no_requests(
    frontend: FakeFrontend, worker: Parkable, asker: Asker
) -> None:
    view = frontend.fleet.view
    await until(lambda: [p.lease for p in view.routable()] == ["w"])
    assert await asker.park() == PARKED
    assert (worker.presence.state, worker.presence.load) == ("parked", None)
    await until(lambda: [p.lease for p in view.parked()] == ["w"])
    assert (view.ready(), view.leaving(), [p.lease for p in view.members() if p.lease == "w"]) == ([], [], ["w"])
    assert await asker.park() == PARKED
    assert await asker.wake() == AWAKE
    assert worker.presence.state == "ready"
    assert worker.presence.load is not None
    assert worker.presence.load.kv_usage == 0.0
    await until(lambda: [p.lease for p in view.routable()] == ["w"])
    assert view.parked() == []
    assert await asker.wake() == AWAKE


async def test_a_request_that_reaches_a_parked_worker_wakes_it(worker: Parkable, asker: Asker) -> None:
    assert await asker.park() == PARKED
    await asker.submit("r")
    await until(lambda: asker.finished("r"))
    assert asker.answer("r") == continuation((1, 2, 3), 4, FAST.mocker_vocab_size)
    assert worker.presence.state == "ready"


async def test_nothing_is_cached_while_it_is_parked(
    bus: Bus, subjects: Subjects, scripted: Parkable, engine: ScriptedEngine, asker: Asker
) -> None:
    engine.pulls, engine.has = Prefix("print", (b"1", b"2")), 2
    cached, pin = CachedQuestion([1, 2, 3]), PinQuestion("p", "print", (b"1",), DEADLINE_S, machine=machine_id())
    assert (await bus.ask(subjects.cached("w"), cached, CachedAnswer, timeout_s=DEADLINE_S)).tokens == 8
    await asker.park()
    assert (await bus.ask(subjects.cached("w"), cached, CachedAnswer, timeout_s=DEADLINE_S)).tokens == 0
    pinned = await bus.ask(subjects.pin("w"), pin, PinAnswer, timeout_s=DEADLINE_S)
    assert (pinned.blocks, "parked" in (pinned.refused or "")) == (0, True)
    assert engine.asked_to_pin.empty()


async def test_a_load_that_is_told_late_is_not_announced(
    scripted: Parkable, engine: ScriptedEngine, asker: Asker
) -> None:
    await asker.park()
    engine.steps.put_nowait(Step(1.0, (), Load(0, 0, 0.5, 0.25)))
    await until(engine.steps.empty)
    assert scripted.usage is None
    await asker.wake()
    assert scripted.usage == (0.0, None)


async def test_it_does_not_park_while_it_has_requests(scripted: Parkable, engine: ScriptedEngine, asker: Asker) -> None:
    await asker.submit("r")
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)
    assert await asker.park() == ParkAnswer(parked=False, refused="it has requests")
    await asker.forget("r")
    await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S)
    assert await asker.park() == PARKED
    assert [engine.parks.get_nowait() for _ in range(engine.parks.qsize())] == [True]


async def test_it_does_not_park_while_a_cancelled_request_is_put_to_the_engine(
    scripted: Parkable, engine: ScriptedEngine, asker: Asker
) -> None:
    """An engine takes its time to load an adapter, for example."""
    engine.admits.clear()
    asked = asyncio.create_task(scripted.service.take(_work("r")))
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)
    await asker.forget("r")
    await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S)
    assert await asker.park() == ParkAnswer(parked=False, refused="it has requests")
    engine.admits.set()
    await asyncio.wait_for(asked, DEADLINE_S)
    assert await asker.park() == PARKED


async def test_it_does_not_park_while_a_request_is_to_move_to_it(
    bus: Bus, subjects: Subjects, scripted: Parkable, asker: Asker
) -> None:
    reserve = Reserve("r", "f", 3, DEADLINE_S)

    async def reserved() -> str | None:
        answer = await bus.ask(subjects.migrations("w"), reserve, MigrationAnswer, timeout_s=DEADLINE_S)
        return answer.refused

    assert await reserved() is None
    assert (await asker.park()).refused == "requests are to move to it"
    await bus.send(subjects.migrations("w"), CancelReservation("r"))
    assert await asker.park() == PARKED
    assert await reserved() == "the worker is parked"


async def test_it_does_not_park_while_it_is_set_apart(
    bus: Bus, subjects: Subjects, scripted: Parkable, asker: Asker
) -> None:
    scripted.context.announcer.update(exclusive=Exclusive("r", "f", free=True))
    assert (await asker.park()).refused == "it is set apart for one request"
    scripted.context.announcer.update(exclusive=None)
    assert await asker.park() == PARKED
    await bus.send(subjects.work("w"), AskExclusive("r", "f"))
    assert await asker.wake() == AWAKE
    assert scripted.presence.exclusive is None


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
async def test_it_parks_from_nothing_but_ready_and_never_over_the_end(
    scripted: Parkable, asker: Asker, engine: ScriptedEngine, state: str
) -> None:
    scripted.context.announcer.update(state=state)
    assert await asker.park() == ParkAnswer(parked=False, refused=f"the worker is {state}")
    scripted.context.announcer.update(state="ready")
    engine.pauses.clear()
    parking = asyncio.create_task(asker.park())
    assert await asyncio.wait_for(engine.parks.get(), DEADLINE_S)
    scripted.context.announcer.update(state=state)
    engine.pauses.set()
    await parking
    assert scripted.presence.state == state
    await asker.wake()
    assert scripted.presence.state == state


async def test_it_does_not_park_once_it_ends(scripted: Parkable, asker: Asker) -> None:
    scripted.parking.stop()
    assert await asker.park() == ParkAnswer(parked=False, refused="the worker is ending")


async def test_an_engine_that_refuses_goes_on(scripted: Parkable, engine: ScriptedEngine, asker: Asker) -> None:
    engine.park_raises = EngineError("blocks of its KV cache are kept for readers")
    assert await asker.park() == ParkAnswer(parked=False, refused="blocks of its KV cache are kept for readers")
    assert (scripted.presence.state, scripted.service.parking.resting) == ("ready", False)
    await asker.submit("r")
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)


async def test_a_request_that_comes_while_it_parks_is_served(
    scripted: Parkable, engine: ScriptedEngine, asker: Asker
) -> None:
    engine.pauses.clear()
    parking = asyncio.create_task(asker.park())
    assert await asyncio.wait_for(engine.parks.get(), DEADLINE_S)
    await asker.submit("r")
    await until(lambda: scripted.service.why_busy() == "it has requests")
    assert engine.submitted.empty()
    engine.pauses.set()
    assert await parking == ParkAnswer(parked=False, refused="it is needed again")
    assert (await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)).request_id == "r"
    assert scripted.presence.state == "ready"


async def test_a_request_that_is_cancelled_while_it_waits_is_not_put_to_the_engine(
    scripted: Parkable, engine: ScriptedEngine, asker: Asker
) -> None:
    await asker.park()
    engine.wakes.clear()
    await asker.submit("r")
    await until(lambda: engine.parks.qsize() == 2)
    await asker.forget("r")
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == RequestEpoch("r", 1)
    await asker.submit("s")
    engine.wakes.set()
    assert (await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)).request_id == "s"
    assert engine.submitted.empty()


async def test_an_engine_that_does_not_wake_ends_the_worker(
    connect: Connect, subjects: Subjects, engine: ScriptedEngine, asker: Asker
) -> None:
    worker = await parkable(connect, subjects, engine)
    engine.wake_raises = EngineError("the engine's memory has not come back")
    assert await asker.park() == PARKED
    failed = asyncio.create_task(worker.context.tasks.failed())
    await asker.submit("r")
    with pytest.raises(EngineError, match="has not come back"):
        await asyncio.wait_for(failed, DEADLINE_S)
    # Its frontend is not kept waiting, nor told anything wrong: it hears that the worker has failed.
    assert worker.service.abandoned
    assert asker.answer("r") == []
    await worker.context.tasks.close()


async def test_a_parked_worker_keeps_its_role_and_takes_no_prefill_jobs(
    bus: Bus, subjects: Subjects, connect: Connect, engine: ScriptedEngine, asker: Asker
) -> None:
    await create_prefill_queue(bus, subjects)
    worker = await parkable(connect, subjects, engine, PREFILL_ROLE)
    assert worker.takes_jobs()
    assert await asker.park() == PARKED
    assert not worker.takes_jobs()
    answer = await worker.roles.take_up("decode")
    assert answer.role == PREFILL_ROLE
    assert answer.refused == "the worker is parked"
    await asker.wake()
    assert worker.takes_jobs()
    engine.park_raises = EngineError("not now")
    assert (await asker.park()).refused == "not now"
    assert worker.takes_jobs()
    await worker.close()


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_is_lost_whatever_comes_when(worker: Parkable, asker: Asker, seed: int) -> None:
    """Orders and requests of two sides, in any order and without a pause."""
    draws = random.Random(seed)
    requests = {f"r{number}": (number, number + 1, number + 2) for number in range(80)}

    async def orders() -> None:
        while True:
            answer = await asker.order(parked=draws.random() < 0.8)
            assert answer.refused != "the worker is parked"

    async def ask() -> None:
        for request_id, prompt in requests.items():
            await asker.submit(request_id, prompt)
            if draws.random() < 0.6:
                await until(lambda one=request_id: asker.finished(one))  # type: ignore[misc]

    ordering = asyncio.create_task(orders())
    await asyncio.wait_for(ask(), DEADLINE_S)
    await until(lambda: all(map(asker.finished, requests)))
    ordering.cancel()
    with suppress(asyncio.CancelledError):
        await ordering
    for request_id, prompt in requests.items():
        assert asker.answer(request_id) == continuation(prompt, 4, FAST.mocker_vocab_size)
    await until(lambda: worker.service.why_busy() in (None, "the worker is parked"))
    assert await asker.wake() == AWAKE
    assert await asker.park() == PARKED
    assert worker.presence.state == "parked"


def _work(request_id: str) -> Submit:
    return Submit(request_id, 1, "f", [1, 2, 3], SAMPLING)


# A real server


def test_a_parked_worker_that_is_killed_comes_back_ready(tmp_path: Path) -> None:
    arguments = ["-m", "dynamo_local.cli.main", "serve", "tests.integration.supervisor.roles_graph:Front"]
    engines = ["--VllmWorker.engine=mocker", "--PrefillWorker.engine=mocker"]
    options = ["--namespace=parking", "--port=0", "--cpu-slots=2", *engines]
    with ServerProcess(tmp_path, "parking", [*arguments, *options]) as server:
        server.line("all services ready")
        worker = server.state().components["parking_VllmWorker"]
        assert worker.lease is not None

        async def park() -> ParkAnswer:
            bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
            try:
                subject = Subjects("parking", FIRST_OF_MAIN).parking(worker.lease or "")
                return await bus.ask(subject, ParkQuestion(parked=True), ParkAnswer, timeout_s=DEADLINE_S)
            finally:
                await bus.close()

        def presence_of_worker() -> str:
            rows = ControlClient(server.paths).do(LIST_WORKERS)["data"]
            return next(str(row["state"]) for row in rows if row["watcher"] == "parking_VllmWorker")

        assert asyncio.run(park()) == PARKED
        assert presence_of_worker() == "parked"
        old = server.pid("VllmWorker")
        os.kill(old, signal.SIGKILL)
        eventually(
            lambda: server.state().components["parking_VllmWorker"].pid not in (None, old), "nobody takes its place"
        )
        eventually(lambda: presence_of_worker() == "ready", "it is not ready")
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()
