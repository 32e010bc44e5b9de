"""A worker that takes in requests: room, warm requests, and what is left of those that do not come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.messages.work import (
    Cancel,
    CancelReservation,
    MigrationAnswer,
    MigrationRequest,
    RequestEpoch,
    Reserve,
    Submit,
    TokenDelta,
    Warm,
    Work,
)
from dynamo_local.core.ports import Prefix, Step
from dynamo_local.core.subjects import Subjects
from state.machine.identity import machine_id
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, until
from tests.integration.workers.worker_parts import SCRIPTED_BLOCK_SIZE, ScriptedEngine, Worker, context_of, serving

pytestmark = pytest.mark.integration

PREFIX = Prefix("same", tuple(map(bytes, range(6))))
LENT = PinAnswer(6, until=1e9, handle=msgspec.Raw(b"\x93\x01\x02\x03"), machine=machine_id())
LONG_S = 1e9


class Asker:
    """A frontend, and the worker that lends its KV."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self.lends = LENT

    async def start(self) -> Asker:
        await self._bus.serve(self._subjects.pin("source"), PinQuestion, self._on_pin)
        await self._bus.flush()
        return self

    async def ask(self, word: Reserve | Warm) -> MigrationAnswer:
        return await self._bus.ask(self._subjects.migrations("w"), word, MigrationAnswer, timeout_s=DEADLINE_S)

    async def reserve(
        self, request_id: str = "r1", tokens: int = 20, keep_s: float = LONG_S, floor: float | None = None
    ) -> str | None:
        return (await self.ask(Reserve(request_id, "f1", tokens, keep_s, floor))).refused

    def warm(self, request_id: str = "r1", within_s: float = LONG_S, tokens: int = 25) -> asyncio.Task[MigrationAnswer]:
        question = Warm(request_id, "source", list(range(tokens)), within_s, "salt", adapter="pirate", priority=2)
        return asyncio.create_task(self.ask(question))

    async def say(self, word: MigrationRequest) -> None:
        await self._bus.send(self._subjects.migrations("w"), word)

    async def tell(self, work: Work) -> None:
        await self._bus.send(self._subjects.work("w"), work)

    async def _on_pin(self, _: PinQuestion) -> PinAnswer:
        return self.lends


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(pulls=PREFIX, has=1)


@pytest.fixture
async def asker(bus: Bus, subjects: Subjects) -> Asker:
    return await Asker(bus, subjects).start()


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> AsyncIterator[Worker]:
    async with serving(context_of(await connect(), subjects, "VllmWorker", "aggregated", "w"), engine) as worker:
        yield worker


async def taken(engine: ScriptedEngine) -> Submit:
    return await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)


async def dropped(engine: ScriptedEngine) -> RequestEpoch:
    return await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S)


def ends(work: Submit) -> Step:
    return Step(1.0, (TokenDelta(work.request_id, work.epoch, 0, [7], finish="length"),))


async def warmed(asker: Asker, engine: ScriptedEngine) -> RequestEpoch:
    """A warm request that has run."""
    assert await asker.reserve() is None
    asking = asker.warm()
    work = await taken(engine)
    engine.steps.put_nowait(ends(work))
    assert (await asking).refused is None
    return RequestEpoch(work.request_id, work.epoch)


def arrival(request_id: str = "r1", tokens: int | None = None) -> Submit:
    """With the context that was warmed and some more, if `tokens` is given."""
    token_ids = [1, 2, 3] if tokens is None else list(range(tokens))
    return Submit(request_id, 2, "f1", token_ids, msgspec.Raw(b"\x80"), position=1, cache_salt="salt", adapter="pirate")


async def test_a_warm_request_pulls_for_one_token_and_nobody_hears_of_it(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    assert await asker.reserve() is None
    asking = asker.warm()
    work = await taken(engine)
    assert work.token_ids == list(range(25))
    assert (work.cache_salt, work.adapter, work.priority, work.frontend) == ("salt", "pirate", 2, "")
    assert msgspec.msgpack.decode(work.sampling)["max_tokens"] == 1
    assert work.hold_s > 0
    pulled = engine.pulled.get_nowait()
    assert pulled is not None
    assert (pulled.answer, pulled.cached) == (LENT, 1)
    engine.steps.put_nowait(ends(work))
    assert await asking == MigrationAnswer(pulled_tokens=5 * SCRIPTED_BLOCK_SIZE)
    assert len(worker.service._outbox) == 0
    assert engine.cancelled.empty(), "its blocks are held"


async def test_warm_blocks_are_held_until_the_request_has_its_first_token(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    warm = await warmed(asker, engine)
    await asker.tell(arrival())
    await taken(engine)
    engine.steps.put_nowait(Step(1.0, (TokenDelta("other", 1, 0, [7]),)))
    await until(engine.steps.empty)
    assert engine.cancelled.empty()
    engine.steps.put_nowait(Step(1.0, (TokenDelta("r1", 2, 1, [7]),)))
    assert await dropped(engine) == warm


async def test_a_second_warm_request_takes_the_place_of_the_first(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    first = await warmed(asker, engine)
    asking = asker.warm()
    second = await taken(engine)
    engine.steps.put_nowait(ends(second))
    assert (await asking).refused is None
    assert await dropped(engine) == first
    await asker.say(CancelReservation("r1"))
    assert await dropped(engine) == RequestEpoch(second.request_id, second.epoch)


async def test_who_does_not_come_leaves_nothing_behind(asker: Asker, worker: Worker, engine: ScriptedEngine) -> None:
    assert await asker.reserve(keep_s=DEADLINE_S) is None
    asking = asker.warm()
    work = await taken(engine)
    engine.steps.put_nowait(ends(work))
    assert (await asking).refused is None
    await worker.service._migration_target.expire(time.monotonic() + DEADLINE_S)
    assert await dropped(engine) == RequestEpoch(work.request_id, work.epoch)


async def test_slots_and_blocks_that_run_or_are_promised_are_not_given_again(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    # The engine has ten slots, and 100 blocks of four tokens.
    worker.context.announcer.note(load=Load(2, 0, 0.5))
    assert await asker.reserve("a", tokens=120) is None
    assert await asker.reserve("b", tokens=120) == "too little of its KV cache is free"
    for number in range(8):
        await asker.tell(arrival(f"busy{number}"))
        await taken(engine)
    assert await asker.reserve("b", tokens=8) is None
    assert await asker.reserve("c", tokens=8) == "as many requests run there as it can run"
    await asker.say(CancelReservation("b"))
    assert await asker.reserve("c", tokens=8) is None


async def test_a_guest_is_taken_in_only_if_all_that_are_promised_room_leave_it_as_free_as_is_wanted(
    asker: Asker, worker: Worker
) -> None:
    # 400 tokens of cache; half of them are used.
    worker.context.announcer.note(load=Load(1, 0, 0.5, at=time.monotonic()))
    assert await asker.reserve("a", tokens=40, floor=81.0) == "the worker would be too full"
    assert await asker.reserve("a", tokens=40, floor=80.0) is None
    assert await asker.reserve("b", tokens=40, floor=39.0) == "the worker would be too full"
    assert await asker.reserve("b", tokens=40, floor=38.0) is None
    assert await asker.reserve("c", tokens=40) is None


async def test_nobody_is_taken_in_while_the_load_is_not_known(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    await asker.tell(arrival("busy"))
    await taken(engine)
    worker.context.announcer.note(load=Load())
    assert await asker.reserve() == "the load of the worker is not known yet"


async def test_a_draining_worker_takes_nobody_in(asker: Asker, worker: Worker) -> None:
    await worker.service.drain(DEADLINE_S)
    assert await asker.reserve() == "the worker is draining"


async def test_nothing_is_warmed_without_room(asker: Asker, worker: Worker, engine: ScriptedEngine) -> None:
    assert (await asker.warm()).refused == "there is no reservation for the request"
    assert engine.submitted.empty()


@pytest.mark.parametrize(
    ("lends", "prefix", "refused"),
    [
        (PinAnswer(0, refused="busy"), PREFIX, "too little of its KV can be pulled from the source"),
        (PinAnswer(2, until=1e9, machine=machine_id()), PREFIX, "too little of its KV can be pulled from the source"),
        (LENT, None, "the engine cannot pull KV"),
    ],
)
async def test_what_is_not_lent_is_not_computed(
    asker: Asker, worker: Worker, engine: ScriptedEngine, lends: PinAnswer, prefix: Prefix | None, refused: str
) -> None:
    asker.lends, engine.pulls = lends, prefix
    await asker.reserve()
    assert (await asker.warm()).refused == refused
    assert engine.submitted.empty()


async def test_an_engine_that_takes_no_warm_request_is_a_refusal(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    await asker.reserve()
    engine.submit_raises = EngineError("it is dying")
    assert (await asker.warm()).refused == "it is dying"
    engine.submit_raises = ValueError("?")
    assert (await asker.warm()).refused == "the warm request failed"


async def test_a_warm_request_that_takes_too_long_is_dropped(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    await asker.reserve()
    asking = asker.warm(within_s=1.0)
    work = await taken(engine)
    assert (await asking).refused == "the worker is too busy"
    assert await dropped(engine) == RequestEpoch(work.request_id, work.epoch)


async def announce_frontend(bus: Bus, subjects: Subjects, lease: str) -> None:
    presence = Presence(f"{subjects.namespace}_Front", "Front", "frontend", lease, 1, "ready")
    await bus.send(subjects.presence(presence.watcher, presence.role), presence)


def told_load(worker: Worker) -> Load:
    """As the engine tells it, but for the time."""
    load = worker.context.announcer.presence.load or Load()
    return Load(load.running, load.waiting, load.kv_usage, load.kv_pinned)


async def test_warm_requests_are_no_part_of_the_load(asker: Asker, worker: Worker, engine: ScriptedEngine) -> None:
    await asker.reserve()
    asking = asker.warm()
    work = await taken(engine)
    for told, shown in ((Load(3, 1, 0.1), Load(3, 0, 0.1)), (Load(3, 0, 0.1), Load(2, 0, 0.1))):
        engine.steps.put_nowait(Step(1.0, (), told))
        await until(lambda shown=shown: told_load(worker) == shown)  # type: ignore[misc]
    engine.steps.put_nowait(ends(work))
    await asking
    engine.steps.put_nowait(Step(1.0, (), Load(3, 0, 0.1)))
    await until(lambda: told_load(worker) == Load(3, 0, 0.1))


@pytest.mark.parametrize("arrives", [False, True])
async def test_the_guests_of_a_frontend_that_is_gone_leave(
    asker: Asker, worker: Worker, engine: ScriptedEngine, bus: Bus, subjects: Subjects, arrives: bool
) -> None:
    await announce_frontend(bus, subjects, "f1")
    warm = await warmed(asker, engine)
    if arrives:
        await asker.tell(arrival())
        await taken(engine)
    await announce_frontend(bus, subjects, "its successor")
    expected = {warm, RequestEpoch("r1", 2)} if arrives else {warm}
    assert {await dropped(engine) for _ in expected} == expected


async def test_a_guest_that_is_cancelled_is_gone_in_the_end(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    warm = await warmed(asker, engine)
    await asker.tell(arrival())
    await taken(engine)
    await asker.tell(Cancel((RequestEpoch("r1", 2),)))
    assert await dropped(engine) == RequestEpoch("r1", 2)
    await asker.say(CancelReservation("r1"))
    assert await dropped(engine) == warm


async def test_requests_grow_from_what_is_warm_and_nothing_is_pulled_again(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    engine.grows = True
    first = await warmed(asker, engine)
    engine.pulled.get_nowait()
    asking = asker.warm(tokens=27)
    second = await taken(engine)
    assert engine.grown.get_nowait() == first
    engine.steps.put_nowait(ends(second))
    assert await asking == MigrationAnswer()
    await asker.tell(arrival(tokens=29))
    assert (await taken(engine)).epoch == 2
    assert engine.grown.get_nowait() == RequestEpoch(second.request_id, second.epoch)
    assert engine.pulled.empty()


async def test_what_did_not_grow_is_put_to_the_engine_as_usual(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    await warmed(asker, engine)
    engine.pulled.get_nowait()
    await asker.tell(arrival(tokens=29))
    assert (await taken(engine)).token_ids == list(range(29))
    assert engine.pulled.get_nowait() is None


async def test_another_context_does_not_grow_from_it(asker: Asker, worker: Worker, engine: ScriptedEngine) -> None:
    engine.grows = True
    await warmed(asker, engine)
    await asker.tell(arrival())
    await taken(engine)
    assert engine.grown.empty()


async def test_much_that_is_lacking_is_pulled_not_computed(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    engine.grows = True
    first = await warmed(asker, engine)
    asking = asker.warm(tokens=25 + 2 * SCRIPTED_BLOCK_SIZE + 1)
    second = await taken(engine)
    assert engine.grown.empty()
    engine.steps.put_nowait(ends(second))
    assert (await asking).refused is None
    assert await dropped(engine) == first


async def test_what_is_cancelled_while_it_grows_is_dropped(
    asker: Asker, worker: Worker, engine: ScriptedEngine
) -> None:
    engine.grows = True
    await warmed(asker, engine)
    engine.admits.clear()
    await asker.tell(arrival(tokens=29))
    await taken(engine)
    await asker.tell(Cancel((RequestEpoch("r1", 2),)))
    assert await dropped(engine) == RequestEpoch("r1", 2)
    engine.admits.set()
    assert await dropped(engine) == RequestEpoch("r1", 2)
    assert engine.submitted.empty()
