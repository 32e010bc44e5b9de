"""Two workers' duties around a pull between machines: nothing counts before the source has confirmed its pin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from components.workers.kv_puller import KvPuller
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.kv import ConfirmAnswer, ConfirmQuestion, PinAnswer, PinQuestion
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Prefix, PulledPrefix
from dynamo_local.core.subjects import Subjects
from state.machine.identity import machine_id
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S
from tests.integration.workers.worker_parts import ScriptedEngine, Worker, context_of, serving

pytestmark = pytest.mark.integration

NETWORK = "10.1.2.0/24"
PREFIX = Prefix("same", (b"a", b"b", b"c"))
LENT = PinAnswer(3, until=1e9, handle=msgspec.Raw(b"\x93\x01\x02\x03"))
FAR = msgspec.structs.replace(LENT, until=0.0, machine="another", pin="theirs.1")
WORK = Submit("r1", 2, "f1", [1, 2, 3], msgspec.Raw(b"\x80"), position=1, source="source")
REQUEST = RequestEpoch("r1", 2)
QUESTION = PinQuestion("pin", "same", (b"a", b"b"), 10.0, machine="another", network=NETWORK)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(pulls=PREFIX, has=1, lends=LENT, kv_network=NETWORK)


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> AsyncIterator[Worker]:
    async with serving(context_of(await connect(), subjects, "VllmWorker", "decode", "w"), engine) as worker:
        yield worker


class FarSource:
    """A worker on another machine. It confirms when `confirms` is set."""

    def __init__(self, answer: PinAnswer, *, held: bool = True) -> None:
        self.answer = answer
        self.held = held
        self.asked: asyncio.Queue[PinQuestion] = asyncio.Queue()
        self.questioned: asyncio.Queue[str] = asyncio.Queue()
        self.confirms = asyncio.Event()
        self.confirms.set()

    async def start(self, bus: Bus, subjects: Subjects) -> FarSource:
        await bus.serve(subjects.pin("source"), PinQuestion, self._on_pin)
        await bus.serve(subjects.confirm("source"), ConfirmQuestion, self._on_confirm)
        await bus.flush()
        return self

    async def _on_pin(self, question: PinQuestion) -> PinAnswer:
        self.asked.put_nowait(question)
        return self.answer

    async def _on_confirm(self, question: ConfirmQuestion) -> ConfirmAnswer:
        self.questioned.put_nowait(question.pin)
        await self.confirms.wait()
        return ConfirmAnswer(self.held)


async def pulled_from(puller: KvPuller) -> PulledPrefix:
    pulled = await puller.pull(WORK, "source")
    assert pulled is not None
    return pulled


async def settled(engine: ScriptedEngine) -> tuple[str, bool]:
    return await asyncio.wait_for(engine.settled.get(), DEADLINE_S)


# The reader


@pytest.mark.parametrize("held", [True, False])
async def test_the_source_is_asked_after_the_read_and_its_word_decides(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, held: bool
) -> None:
    source = await FarSource(FAR, held=held).start(bus, subjects)
    pulled = await pulled_from(KvPuller(worker.context, engine))
    assert source.asked.get_nowait().network == NETWORK
    assert (pulled.pin, pulled.to_confirm) == ("theirs.1", True)
    # By the reader's own clock.
    assert pulled.answer.until > 0.0
    await bus.flush()
    assert source.questioned.empty()
    engine.reads.set()
    assert await settled(engine) == ("theirs.1", held)
    assert source.questioned.get_nowait() == "theirs.1"


async def test_a_source_that_does_not_confirm_in_time_has_not_confirmed(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    source = await FarSource(FAR).start(bus, subjects)
    source.confirms.clear()
    puller = KvPuller(worker.context, engine)
    await pulled_from(puller)
    puller._answer_s = 0.05
    engine.reads.set()
    assert await settled(engine) == ("theirs.1", False)
    source.confirms.set()
    await bus.flush()
    assert engine.settled.empty()


async def test_a_source_that_is_lost_has_not_confirmed(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    source = await FarSource(FAR).start(bus, subjects)
    source.confirms.clear()
    puller = KvPuller(worker.context, engine, answer_s=10 * DEADLINE_S)
    await pulled_from(puller)
    engine.reads.set()
    await asyncio.wait_for(source.questioned.get(), DEADLINE_S)
    puller.lost("source")
    assert await settled(engine) == ("theirs.1", False)
    source.confirms.set()


async def test_a_request_that_is_over_before_its_read_is_not_left_unsettled(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    await FarSource(FAR).start(bus, subjects)
    puller = KvPuller(worker.context, engine)
    await pulled_from(puller)
    await puller.done([REQUEST])
    assert await settled(engine) == ("theirs.1", False)


@pytest.mark.parametrize("missing", ["pin", "machine"])
async def test_a_far_source_that_cannot_be_asked_again_is_not_read(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, missing: str
) -> None:
    await FarSource(msgspec.structs.replace(FAR, **{missing: ""})).start(bus, subjects)
    assert await KvPuller(worker.context, engine).pull(WORK, "source") is None


async def test_without_a_network_a_far_source_is_not_read(
    bus: Bus, subjects: Subjects, connect: Connect, engine: ScriptedEngine
) -> None:
    engine.kv_network = ""
    await FarSource(FAR).start(bus, subjects)
    reader = await Worker(context_of(await connect(), subjects, "VllmWorker", "decode", "n"), engine).start()
    assert await KvPuller(reader.context, engine).pull(WORK, "source") is None
    await reader.close()


async def test_a_source_of_this_machine_is_not_asked_again(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    await FarSource(msgspec.structs.replace(LENT, machine=machine_id())).start(bus, subjects)
    pulled = await pulled_from(KvPuller(worker.context, engine))
    assert (pulled.to_confirm, pulled.answer.until) == (False, LENT.until)


# The lender


async def test_each_question_of_a_far_reader_gets_a_pin_of_its_own(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine
) -> None:
    """Also one that is delivered twice: the second pin must not be taken for the first, which may have ended."""
    answers = [await bus.ask(subjects.pin("w"), QUESTION, PinAnswer, timeout_s=DEADLINE_S) for _ in range(2)]
    asked = [engine.asked_to_pin.get_nowait().pin for _ in answers]
    assert [answer.pin for answer in answers] == asked
    assert len(set(asked)) == 2
    assert {(answer.machine, answer.until) for answer in answers} == {(machine_id(), 0.0)}


@pytest.mark.parametrize("held", [True, False])
async def test_the_engine_says_whether_a_pin_was_held(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, held: bool
) -> None:
    engine.holds = held
    question = ConfirmQuestion("pin.1")
    answer = await bus.ask(subjects.confirm("w"), question, ConfirmAnswer, timeout_s=DEADLINE_S)
    assert answer.held is held
    assert engine.asked_to_confirm.get_nowait() == "pin.1"


@pytest.mark.parametrize(("machine", "network"), [("another", ""), ("another", "10.9.9.0/24"), ("", NETWORK)])
async def test_who_is_not_in_its_network_gets_nothing(
    bus: Bus, subjects: Subjects, worker: Worker, engine: ScriptedEngine, machine: str, network: str
) -> None:
    question = msgspec.structs.replace(QUESTION, machine=machine, network=network)
    answer = await bus.ask(subjects.pin("w"), question, PinAnswer, timeout_s=DEADLINE_S)
    assert answer.blocks == 0
    assert answer.refused
    assert engine.asked_to_pin.empty()


async def test_a_worker_that_has_ended_confirms_nothing(bus: Bus, subjects: Subjects) -> None:
    with pytest.raises(BusError):
        await bus.ask(subjects.confirm("gone"), ConfirmQuestion("pin.1"), ConfirmAnswer, timeout_s=DEADLINE_S)
