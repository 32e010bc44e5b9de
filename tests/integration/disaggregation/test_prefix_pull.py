"""Two workers' duties around a prefix pull: one has blocks kept, the other lends them, and no pin is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from components.workers.kv_puller import KvPuller
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, EngineError, RequestError
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, PinAnswer, PinQuestion, Unpin
from dynamo_local.core.messages.presence import LeaseLost
from dynamo_local.core.messages.work import Cancel, RequestEpoch, Submit, TokenDelta, Work
from dynamo_local.core.ports import Prefix, Step
from dynamo_local.core.subjects import Subjects
from state.machine.identity import machine_id
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, until
from tests.integration.workers.worker_parts import SCRIPTED_BLOCK_SIZE, ScriptedEngine, Worker, context_of, serving

pytestmark = pytest.mark.integration

PREFIX = Prefix("same", (b"a", b"b", b"c"))
LENT = PinAnswer(3, until=1e9, handle=msgspec.Raw(b"\x93\x01\x02\x03"), machine=machine_id())
REQUEST = RequestEpoch("r1", 2)


@dataclass
class Source:
    """Another worker, as far as readers see it. It answers when the test says so."""

    bus: Bus
    subjects: Subjects
    lease: str = "source"
    asked: asyncio.Queue[tuple[PinQuestion, str]] = field(default_factory=asyncio.Queue)
    unpinned: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def start(self) -> Source:
        await self.bus.subscribe(self.subjects.pin(self.lease), self._on_pin)
        await self.bus.listen(self.subjects.work(self.lease), Work, self._on_work)
        await self.bus.flush()
        return self

    async def asks(self) -> tuple[PinQuestion, str]:
        """The next question, and where to answer it."""
        return await asyncio.wait_for(self.asked.get(), DEADLINE_S)

    async def answer(self, reply: str, answer: PinAnswer | bytes) -> None:
        await self.bus.publish(reply, answer if isinstance(answer, bytes) else codec.encode(answer))

    async def forgets(self) -> str:
        """The next pin that its reader needs no more."""
        return await asyncio.wait_for(self.unpinned.get(), DEADLINE_S)

    async def _on_pin(self, message: RawMessage) -> None:
        self.asked.put_nowait((codec.decode(message.data, PinQuestion), message.reply))

    async def _on_work(self, work: Work) -> None:
        assert isinstance(work, Unpin)
        for pin in work.pins:
            self.unpinned.put_nowait(pin)


@pytest.fixture
async def source(bus: Bus, subjects: Subjects) -> Source:
    return await Source(bus, subjects).start()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(pulls=PREFIX, has=1, lends=LENT)


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> AsyncIterator[Worker]:
    """The reader, or the lender: every worker is both."""
    async with serving(context_of(await connect(), subjects, "VllmWorker", "decode", "w"), engine) as worker:
        yield worker


def submission(source: str | None = "source", request: RequestEpoch = REQUEST) -> Submit:
    return Submit(request.request_id, request.epoch, "f1", [1, 2, 3], msgspec.Raw(b"\x80"), position=1, source=source)


async def tell(bus: Bus, subjects: Subjects, work: Work) -> None:
    await bus.send(subjects.work("w"), work)


async def taken(engine: ScriptedEngine) -> Submit:
    return await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)


# The reader


async def test_what_is_kept_is_read_with_the_submission_and_then_unpinned(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    await tell(bus, subjects, submission())
    question, reply = await source.asks()
    assert (question.fingerprint, question.hashes) == (PREFIX.fingerprint, PREFIX.hashes)
    assert question.keep_s > 0
    assert question.machine == machine_id()
    assert engine.submitted.empty()
    await source.answer(reply, LENT)
    assert await taken(engine) == submission()
    pulled = engine.pulled.get_nowait()
    assert pulled is not None
    assert (pulled.pin, pulled.hashes, pulled.answer) == (question.pin, PREFIX.hashes, LENT)
    # Another one's token says nothing about it.
    engine.steps.put_nowait(Step(1.0, (TokenDelta("other", 1, 0, [9]),)))
    engine.steps.put_nowait(Step(1.0, ()))
    await until(engine.steps.empty)
    assert source.unpinned.empty()
    engine.steps.put_nowait(Step(1.0, (TokenDelta("r1", 2, 1, [9]),)))
    assert await source.forgets() == question.pin
    engine.steps.put_nowait(Step(1.0, (TokenDelta("r1", 2, 2, [9], finish="stop"),)))
    await tell(bus, subjects, Cancel((REQUEST,)))
    await until(lambda: len(worker.service._outbox) == 0)
    await bus.flush()
    assert source.unpinned.empty()


async def test_other_requests_do_not_wait_for_a_source(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    await tell(bus, subjects, submission())
    _, reply = await source.asks()
    await tell(bus, subjects, submission(None, RequestEpoch("r2", 1)))
    assert (await taken(engine)).request_id == "r2"
    await source.answer(reply, LENT)
    assert (await taken(engine)).request_id == "r1"


@pytest.mark.parametrize(
    "answer",
    [
        PinAnswer(0, refused="none of the blocks is here"),
        PinAnswer(1, until=1e9, machine=machine_id()),
        msgspec.structs.replace(LENT, machine="another"),
        msgspec.structs.replace(LENT, machine=""),
        b"garbage",
        b"",
    ],
    ids=["refused", "nothing new", "another machine's", "an unknown machine's", "garbage", "empty"],
)
async def test_without_a_useful_answer_it_is_computed(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine, answer: PinAnswer | bytes
) -> None:
    await tell(bus, subjects, submission())
    question, reply = await source.asks()
    await source.answer(reply, answer)
    await taken(engine)
    assert engine.pulled.get_nowait() is None
    # Whatever the answer was, nothing may stay behind.
    assert await source.forgets() == question.pin


async def test_of_a_source_that_is_silent_nothing_is_expected_for_long(
    source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    puller = KvPuller(worker.context, engine, answer_s=0.05)
    assert await puller.pull(submission(), "source") is None
    question, _ = await source.asks()
    assert await source.forgets() == question.pin


async def test_of_a_source_that_is_gone_nothing_is_expected(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    await tell(bus, subjects, submission("nobody"))
    await taken(engine)
    assert engine.pulled.get_nowait() is None


async def test_a_source_that_fails_is_not_waited_for(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    worker.service._kv_puller._answer_s = 10 * DEADLINE_S
    await tell(bus, subjects, submission())
    question, _ = await source.asks()
    await bus.publish(subjects.lost, codec.encode(LeaseLost("source")))
    await taken(engine)
    assert engine.pulled.get_nowait() is None
    assert await source.forgets() == question.pin


@pytest.mark.parametrize("prefix", [None, Prefix("same", ())])
async def test_where_there_is_nothing_to_pull_nothing_is_asked_for(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine, prefix: Prefix | None
) -> None:
    engine.pulls = prefix
    await tell(bus, subjects, submission())
    await taken(engine)
    assert source.asked.empty()


@pytest.mark.parametrize("error", [EngineError("dead"), BusError("down"), ValueError("unforeseen")])
async def test_an_engine_that_does_not_say_what_it_has_computes(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine, error: Exception
) -> None:
    engine.cached_raises = error
    await tell(bus, subjects, submission())
    await taken(engine)
    assert engine.pulled.get_nowait() is None


async def test_a_request_cancelled_while_the_source_is_asked_never_reaches_the_engine(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    await tell(bus, subjects, submission())
    question, reply = await source.asks()
    await tell(bus, subjects, Cancel((REQUEST,)))
    await until(lambda: len(worker.service._outbox) == 0)
    await source.answer(reply, LENT)
    assert await source.forgets() == question.pin
    await tell(bus, subjects, submission(None, RequestEpoch("r2", 1)))
    assert (await taken(engine)).request_id == "r2"


async def test_a_request_cancelled_while_it_reads_is_cancelled_and_unpinned(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    await tell(bus, subjects, submission())
    question, reply = await source.asks()
    await source.answer(reply, LENT)
    await taken(engine)
    await tell(bus, subjects, Cancel((REQUEST,)))
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == REQUEST
    assert await source.forgets() == question.pin


async def test_a_request_cancelled_while_the_engine_takes_it_is_cancelled_once_it_has_it(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine
) -> None:
    engine.admits.clear()
    await tell(bus, subjects, submission())
    _, reply = await source.asks()
    await source.answer(reply, LENT)
    await taken(engine)
    await tell(bus, subjects, Cancel((REQUEST,)))
    # Of no use yet: the engine does not know the request.
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == REQUEST
    engine.admits.set()
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == REQUEST


@pytest.mark.parametrize("error", [RequestError("too long"), EngineError("dead"), ValueError("unforeseen")])
async def test_a_request_that_the_engine_does_not_take_reads_nothing(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker, engine: ScriptedEngine, error: Exception
) -> None:
    engine.submit_raises = error
    await tell(bus, subjects, submission())
    question, reply = await source.asks()
    await source.answer(reply, LENT)
    assert await source.forgets() == question.pin


async def test_waiting_for_a_source_is_no_stall_of_the_engine(
    bus: Bus, subjects: Subjects, source: Source, worker: Worker
) -> None:
    """Nothing was computed for hours before this request came, and nothing is while its source is asked."""
    worker.service._stepped_at = time.monotonic() - 10_000
    await tell(bus, subjects, submission())
    await source.asks()
    assert time.monotonic() - worker.service._stepped_at < DEADLINE_S


# The lender


async def ask(bus: Bus, subject: str, question: Message) -> bytes:
    return await bus.request(subject, codec.encode(question), timeout_s=DEADLINE_S)


@pytest.mark.parametrize(("prefix", "tokens"), [(PREFIX, SCRIPTED_BLOCK_SIZE), (None, 0)])
async def test_what_is_cached_is_told_in_tokens(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, prefix: Prefix | None, tokens: int
) -> None:
    engine.pulls = prefix
    answer = await ask(bus, subjects.cached("w"), CachedQuestion([1, 2, 3], "salt"))
    assert codec.decode(answer, CachedAnswer) == CachedAnswer(tokens)


async def test_blocks_are_lent_and_taken_back(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    question = PinQuestion("pin", "same", (b"a", b"b"), 1e9, machine=machine_id())
    assert codec.decode(await ask(bus, subjects.pin("w"), question), PinAnswer) == LENT
    assert engine.asked_to_pin.get_nowait() == question
    await tell(bus, subjects, Unpin(("pin", "another")))
    assert [await asyncio.wait_for(engine.unpinned.get(), DEADLINE_S) for _ in range(2)] == ["pin", "another"]


@pytest.mark.parametrize("machine", ["", "another"])
async def test_no_blocks_are_lent_to_another_machine(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, machine: str
) -> None:
    question = PinQuestion("pin", "same", (b"a", b"b"), 1e9, machine=machine)
    answer = codec.decode(await ask(bus, subjects.pin("w"), question), PinAnswer)
    assert answer.blocks == 0
    assert answer.refused
    assert engine.asked_to_pin.empty()


@pytest.mark.parametrize("error", [EngineError("dead"), ValueError("unforeseen")])
async def test_an_engine_that_cannot_lend_says_so(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, error: Exception
) -> None:
    engine.pin_raises = error
    answer = codec.decode(
        await ask(bus, subjects.pin("w"), PinQuestion("p", "f", (b"a",), 1e9, machine=machine_id())), PinAnswer
    )
    assert answer.blocks == 0
    assert answer.refused


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x81\xa1v\x63"])
async def test_garbage_is_not_answered_and_harms_nothing(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, garbage: bytes
) -> None:
    for subject in (subjects.pin("w"), subjects.cached("w")):
        await bus.publish(subject, garbage, reply=bus.inbox())
    assert codec.decode(await ask(bus, subjects.cached("w"), CachedQuestion([1])), CachedAnswer).tokens == 4
    assert engine.asked_to_pin.empty()
