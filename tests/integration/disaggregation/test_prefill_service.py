"""The prefill service: which jobs it takes, what it does with them, and when the queue may forget them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from dynamo_local.bus.jetstream.prefill_queue import (
    LIMITS,
    PrefillConsumer,
    PrefillQueue,
    TakenJob,
    create_prefill_queue,
)
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import (
    Cancel,
    PrefillClaim,
    PrefillGrant,
    PrefillJob,
    QueueLength,
    RequestEpoch,
    Submit,
    TokenBatch,
    TokenDelta,
)
from dynamo_local.core.ports import Step
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_fakes import HASTY_QUEUE
from tests.integration.fleet_of_fakes import DEADLINE_S
from tests.integration.workers.worker_parts import PrefillPart, ScriptedEngine, context_of

pytestmark = pytest.mark.integration

FIRST = RequestEpoch("r0", 1)


class Frontend:
    """Publishes jobs, answers their claims as a test says, and hears tokens."""

    def __init__(self, bus: Bus, subjects: Subjects, queue: PrefillQueue, lease: str = "f1") -> None:
        self.lease = lease
        self.queue = queue
        self.claims: asyncio.Queue[PrefillClaim] = asyncio.Queue()
        self.tokens: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self.wants: set[str] = {f"r{number}" for number in range(9)}
        self.answers = asyncio.Event()
        """Cleared by a test, claims are not answered."""
        self.answers.set()
        self._bus = bus
        self._subjects = subjects

    async def start(self) -> Frontend:
        await self._bus.serve(self._subjects.claims(self.lease), PrefillClaim, self._on_claim)
        await self._bus.listen(self._subjects.tokens(self.lease), TokenBatch, self._on_tokens)
        return self

    async def announce(self, lease: str = "f1") -> None:
        presence = Presence(f"{self._subjects.namespace}_Frontend", "Frontend", "frontend", lease, 1, "ready")
        await self._bus.send(self._subjects.presence(presence.watcher, presence.role), presence)

    async def publish(self, *numbers: int, frontend: str | None = None, valid_s: float = 3600.0) -> None:
        for number in numbers:
            await self.queue.publish(PrefillJob(f"j{number}", f"r{number}", frontend or self.lease, 3, valid_s))

    async def claimed(self) -> PrefillClaim:
        return await asyncio.wait_for(self.claims.get(), DEADLINE_S)

    async def hears(self) -> TokenDelta:
        return await asyncio.wait_for(self.tokens.get(), DEADLINE_S)

    async def cancel(self, *requests: RequestEpoch) -> None:
        await self._bus.send(self._subjects.work("w"), Cancel(requests))

    async def length(self, waiting: int, in_hand: int) -> None:
        """The queue is that long, at last."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.queue.length() != QueueLength(waiting, in_hand):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def left(self, jobs: int) -> None:
        """So many jobs are in the queue, at last. (One that was delivered and given back counts as in hand.)"""
        async with asyncio.timeout(DEADLINE_S):
            while (length := await self.queue.length()).waiting + length.in_hand != jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _on_claim(self, claim: PrefillClaim) -> PrefillGrant:
        self.claims.put_nowait(claim)
        await self.answers.wait()
        work = Submit(claim.request_id, claim.delivery, self.lease, [1, 2, 3], msgspec.Raw(b"\x80"), hold_s=60.0)
        return PrefillGrant(work if claim.request_id in self.wants else None)

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            self.tokens.put_nowait(delta)


Queued = Callable[..., Awaitable[Frontend]]


@pytest.fixture
async def frontend(connect: Connect, subjects: Subjects) -> Frontend:
    bus = await connect()
    await create_prefill_queue(bus, subjects, LIMITS)
    return await Frontend(bus, subjects, PrefillQueue(bus, subjects)).start()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def worker(
    frontend: Frontend, connect: Connect, subjects: Subjects, engine: ScriptedEngine
) -> AsyncIterator[PrefillPart]:
    """Computes two jobs at once."""
    worker = PrefillPart(context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w"), engine, batch=2)
    await worker.start()
    worker.prefill.start()
    yield worker
    await worker.close()


async def taken(engine: ScriptedEngine) -> Submit:
    return await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)


def end_of(request: RequestEpoch) -> Step:
    return Step(1.0, (TokenDelta(request.request_id, request.epoch, 0, [7], finish="length"),))


# A job


async def test_a_job_is_claimed_prefilled_and_kept_until_the_decode_worker_has_taken_over(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0)
    assert await frontend.claimed() == PrefillClaim("j0", "r0", "w", 1)
    assert (await taken(engine)).hold_s == 60.0
    engine.steps.put_nowait(end_of(FIRST))
    assert await frontend.hears() == TokenDelta("r0", 1, 0, [7], finish="length")
    assert await frontend.queue.length() == QueueLength(waiting=0, in_hand=1)
    assert engine.cancelled.empty()
    await frontend.cancel(FIRST)
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == FIRST
    await frontend.length(0, 0)


async def test_no_more_are_computed_at_once_than_the_batch_says(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0, 1, 2)
    first, second = await taken(engine), await taken(engine)
    assert {first.request_id, second.request_id} == {"r0", "r1"}
    await frontend.length(1, 2)
    # One that waits to be fetched takes nobody's place.
    engine.steps.put_nowait(end_of(FIRST))
    assert (await taken(engine)).request_id == "r2"
    await frontend.length(0, 3)


async def test_a_job_that_is_not_wanted_is_ended_and_makes_room(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    frontend.wants = {"r2"}
    await frontend.publish(0, 1, 2)
    assert (await taken(engine)).request_id == "r2"
    await frontend.length(0, 1)


async def test_a_job_that_is_void_is_ended_when_nobody_answers_for_it(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0, frontend="nobody", valid_s=-1.0)
    await frontend.publish(1, valid_s=-1.0)
    assert (await frontend.claimed()).request_id == "r1"
    await frontend.length(0, 1)


async def test_a_job_of_a_frontend_that_does_not_answer_stays_in_the_queue(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0, frontend="nobody")
    await frontend.publish(1)
    assert (await taken(engine)).request_id == "r1"
    await frontend.length(0, 2)


async def test_a_frontend_that_hangs_is_not_asked_for_each_of_its_jobs(
    frontend: Frontend, connect: Connect, subjects: Subjects, engine: ScriptedEngine
) -> None:
    other = await Frontend(await connect(), subjects, frontend.queue, "f2").start()
    context = context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w")
    worker = await PrefillPart(context, engine, batch=1, claim_s=0.1).start()
    frontend.answers.clear()
    await frontend.publish(*range(8))
    await other.publish(8)
    worker.prefill.start()
    assert (await taken(engine)).request_id == "r8"
    frontend.answers.set()
    last = PrefillClaim("last", "last", "w", 1)
    await (await connect()).ask(subjects.claims(frontend.lease), last, PrefillGrant, timeout_s=DEADLINE_S)
    asked = [frontend.claims.get_nowait().request_id for _ in range(frontend.claims.qsize())]
    assert asked == ["r0", "r1", "last"]
    await worker.close()


async def test_a_frontend_that_was_slow_once_is_asked_for_its_next_job(
    frontend: Frontend, connect: Connect, subjects: Subjects, engine: ScriptedEngine
) -> None:
    context = context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w")
    worker = await PrefillPart(context, engine, batch=1, claim_s=1.0).start()
    seen: list[object] = []

    async def answer_from_the_second_on(claim: object) -> None:
        seen.append(claim)
        if len(seen) > 1:
            frontend.answers.set()

    await (watching := await connect()).subscribe(subjects.claims(frontend.lease), answer_from_the_second_on)
    await watching.flush()
    frontend.answers.clear()
    await frontend.publish(0, 1)
    worker.prefill.start()
    first = await taken(engine)
    assert RequestEpoch(first.request_id, first.epoch) == RequestEpoch("r1", 1)
    await worker.close()


async def test_a_job_that_the_engine_refuses_is_done(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    engine.submit_raises = ValueError("?")
    await frontend.publish(0)
    failure = await frontend.hears()
    assert (failure.request_id, failure.finish, failure.refused) == ("r0", "error", False)
    await frontend.length(0, 0)


async def test_a_request_cancelled_at_work_ends_its_job(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0)
    await taken(engine)
    await frontend.cancel(FIRST)
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == FIRST
    await frontend.length(0, 0)


async def test_when_its_frontend_is_gone_nothing_is_kept_for_it(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0)
    await taken(engine)
    engine.steps.put_nowait(end_of(FIRST))
    await frontend.hears()
    await frontend.announce()
    await frontend.announce("its successor")
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == FIRST
    await frontend.length(0, 0)


async def test_a_job_in_hand_is_kept_alive(
    connect: Connect, subjects: Subjects, frontend: Frontend, engine: ScriptedEngine, worker: PrefillPart
) -> None:
    """As long as it takes, computed or held: nobody else gets it."""
    await frontend.publish(0, 1)
    for _ in range(2):
        await taken(engine)
    engine.steps.put_nowait(end_of(FIRST))
    jobs = [job async for job in _kept_alive(await connect(), subjects, 4)]
    assert sorted(set(jobs)) == sorted(jobs[:2])


async def _kept_alive(bus: Bus, subjects: Subjects, count: int) -> AsyncIterator[str]:
    """Acknowledgement subjects on which progress is told."""
    told: asyncio.Queue[str] = asyncio.Queue()

    async def on_word(message: RawMessage) -> None:
        if message.data == b"+WPI":
            told.put_nowait(message.subject)

    await bus.subscribe(f"$JS.ACK.{subjects.prefill_stream}.>", on_word)
    for _ in range(count):
        yield await asyncio.wait_for(told.get(), DEADLINE_S)


# Stopping


async def test_after_its_stop_no_job_is_taken_and_those_in_hand_go_on(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    await frontend.publish(0)
    await taken(engine)
    await worker.prefill.stop()
    await frontend.publish(1)
    engine.steps.put_nowait(end_of(FIRST))
    assert (await frontend.hears()).token_ids == [7]
    await frontend.cancel(FIRST)
    await frontend.left(1)
    assert engine.submitted.empty()
    # Taken up again, it goes on where it was.
    worker.prefill.start()
    assert (await taken(engine)).request_id == "r1"


async def test_a_stop_waits_for_what_has_been_claimed(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine
) -> None:
    """A worker that drains refuses what comes after; a claim that is answered then would be a prefill lost."""
    frontend.answers.clear()
    await frontend.publish(0)
    await frontend.claimed()
    stopping = asyncio.create_task(worker.prefill.stop())
    ended, _ = await asyncio.wait([stopping], timeout=0.2)
    assert not ended
    frontend.answers.set()
    await asyncio.wait_for(stopping, DEADLINE_S)
    assert engine.submitted.get_nowait().request_id == "r0"


GIVEN_UP = "had not been fetched"


async def test_a_drain_waits_until_what_is_held_has_been_fetched(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.publish(0)
    await taken(engine)
    await worker.prefill.stop()
    draining = asyncio.create_task(worker.service.drain(deadline_s=3600))
    engine.steps.put_nowait(end_of(FIRST))
    await frontend.hears()
    assert not draining.done()
    await frontend.cancel(FIRST)
    await asyncio.wait_for(draining, DEADLINE_S)
    assert GIVEN_UP not in caplog.text
    await frontend.length(0, 0)


async def test_a_drain_does_not_wait_for_ever(
    frontend: Frontend, worker: PrefillPart, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.publish(0)
    await taken(engine)
    await worker.prefill.stop()
    engine.steps.put_nowait(end_of(FIRST))
    await frontend.hears()
    await asyncio.wait_for(worker.service.drain(deadline_s=0.05), DEADLINE_S)
    assert GIVEN_UP in caplog.text
    # Whoever delivers the job again will learn that it is not wanted, or prefill it again.
    assert await frontend.queue.length() == QueueLength(waiting=0, in_hand=1)


# The queue


async def test_a_worker_that_dies_leaves_its_job_to_another(
    connect: Connect, subjects: Subjects, bus: Bus, engine: ScriptedEngine
) -> None:
    await create_prefill_queue(bus, subjects, HASTY_QUEUE)
    frontend = await Frontend(bus, subjects, PrefillQueue(bus, subjects)).start()
    parts = []
    for lease in ("dies", "w"):
        context = context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, lease)
        parts.append(await PrefillPart(context, engine).start())
    parts[0].prefill.start()
    await frontend.publish(0)
    assert (await frontend.claimed()).worker == "dies"
    await taken(engine)
    await parts[0].context.bus.close()
    parts[1].prefill.start()
    assert await frontend.claimed() == PrefillClaim("j0", "r0", "w", 2)
    assert (await taken(engine)).epoch == 2
    for part in parts:
        await part.close()


async def test_without_a_queue_a_worker_waits_for_one_and_says_so_once(
    connect: Connect,
    subjects: Subjects,
    bus: Bus,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("components.workers.prefill_service._TAKE_S", 0.05)
    asked = asyncio.Event()
    pulls = 0

    async def on_pull(_: RawMessage) -> None:
        nonlocal pulls
        pulls += 1
        if pulls == 5:
            asked.set()

    await bus.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.prefill_stream}.>", on_pull)
    context = context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w")
    worker = await PrefillPart(context, engine).start()
    worker.prefill.start()
    await asyncio.wait_for(asked.wait(), DEADLINE_S)
    assert caplog.text.count("has no prefill queue") == 1
    await create_prefill_queue(bus, subjects)
    frontend = await Frontend(bus, subjects, PrefillQueue(bus, subjects)).start()
    await frontend.publish(0)
    assert (await taken(engine)).request_id == "r0"
    await worker.close()


async def test_it_stops_though_its_connection_ignores_a_cancellation(
    worker: PrefillPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nats-py does while it flushes."""
    waits = asyncio.Event()

    async def take(*_: object) -> list[TakenJob]:
        waits.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return []

    await worker.prefill.stop()
    monkeypatch.setattr(PrefillConsumer, "take", take)
    worker.prefill.start()
    async with asyncio.timeout(DEADLINE_S):
        await waits.wait()
        await worker.prefill.stop()
