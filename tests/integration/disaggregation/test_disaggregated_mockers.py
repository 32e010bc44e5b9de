"""A frontend, a queue, mockers that prefill and mockers that decode: every answer is right, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from components.workers.requests.sender import RESEND_AFTER_S
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.work import Cancel, QueueLength, RequestEpoch, Submit, Work
from dynamo_local.core.ports import PulledPrefix, Request
from dynamo_local.core.request.disaggregation import PrefillLimits
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_fakes import ENDLESS, remote_prefill
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, all_right, answers, asking_for, nothing_left_at, right
from tests.integration.workers.worker_parts import PrefillPart, Worker, context_of

pytestmark = pytest.mark.integration

LIMITS = PrefillLimits(max_local_prefill_length=40, max_prefill_queue_size=1000)


class Counting(MockerEngine):
    """Counts submissions that came with something to read."""

    reads = 0

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        self.reads += pulled is not None
        await super().submit(work, pulled)


class StartWorker(Protocol):
    """Starts a worker in the given role and with the given lease."""

    async def __call__(self, role: str, lease: str, resend_after_s: float = RESEND_AFTER_S) -> PrefillPart: ...


@pytest.fixture
async def mocked(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[StartWorker]:
    workers: list[PrefillPart] = []

    async def start(role: str, lease: str, resend_after_s: float = RESEND_AFTER_S) -> PrefillPart:
        context = context_of(await connect(), subjects, "VllmWorker", role, lease)
        worker = PrefillPart(context, Counting(FAST, tmp_path), resend_after_s=resend_after_s)
        workers.append(worker)
        await worker.start()
        if role == PREFILL_ROLE:
            worker.prefill.start()
        return worker

    yield start
    for worker in workers:
        await worker.prefill.stop()
        await worker.close()
        await worker.engine.close(1.0)


@pytest.fixture
async def queue(bus: Bus, subjects: Subjects) -> PrefillQueue:
    await create_prefill_queue(bus, subjects)
    return PrefillQueue(bus, subjects)


@pytest.fixture
async def front(connect: Connect, subjects: Subjects, queue: PrefillQueue) -> AsyncIterator[FakeFrontend]:
    remote = remote_prefill(ENDLESS, LIMITS)
    front = await FakeFrontend(await connect(), subjects, remote_of=remote).start()
    yield front
    await front.close()


def drawn(rng: random.Random, number: int) -> Request:
    tokens = rng.randint(1, 12)
    prompt = rng.choices(range(FAST.mocker_vocab_size), k=rng.randint(1, 400))
    survival = Survival() if rng.random() < 0.8 else Survival(Fidelity.NONE, "seed")
    return request(f"r{number}", tuple(prompt), sampling=asking_for(tokens), max_tokens=tokens, survival=survival)


async def nothing_left(front: FakeFrontend, queue: PrefillQueue, workers: Sequence[Worker]) -> None:
    await nothing_left_at(front, workers)
    async with asyncio.timeout(DEADLINE_S):
        while await queue.length() != QueueLength(0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def knows(front: FakeFrontend, workers: int) -> None:
    roles = ("decode", PREFILL_ROLE)
    await until(lambda: len(front.fleet.view.routable(roles)) == workers)


async def test_every_request_gets_its_own_answer_wherever_it_was_prefilled(
    front: FakeFrontend, queue: PrefillQueue, mocked: StartWorker
) -> None:
    rng = random.Random(4)
    decoding = [await mocked("decode", f"d{number}") for number in range(2)]
    prefilling = [await mocked(PREFILL_ROLE, f"p{number}") for number in range(2)]
    await knows(front, 4)
    asked = {one.request_id: one for one in (drawn(rng, number) for number in range(120))}
    for one in asked.values():
        await front.dispatcher.submit(one)
    assert await answers(front, asked) == all_right(asked)
    await nothing_left(front, queue, [*decoding, *prefilling])
    assert front.remote is not None
    long = sum(len(one.prompt_token_ids) > LIMITS.max_local_prefill_length for one in asked.values())
    outcomes = front.remote.outcomes
    assert outcomes["prefilled elsewhere"] == outcomes["long"] > long / 2
    reads = [worker.engine.reads for worker in decoding if isinstance(worker.engine, Counting)]
    ended_there = sum(one.max_tokens == 1 for one in asked.values())
    assert sum(reads) >= outcomes["prefilled elsewhere"] - ended_there > 0


async def test_requests_that_clients_leave_at_any_moment_leave_nothing_behind(
    front: FakeFrontend, queue: PrefillQueue, mocked: StartWorker
) -> None:
    rng = random.Random(5)
    workers = [await mocked("decode", "d"), await mocked(PREFILL_ROLE, "p")]
    await knows(front, 2)
    asked = [drawn(rng, number) for number in range(120)]
    stayed = {one.request_id: one for one in rng.sample(asked, 60)}
    leaving = [one.request_id for one in asked if one.request_id not in stayed]
    reading = asyncio.create_task(answers(front, stayed))
    for number, one in enumerate(asked):
        await front.dispatcher.submit(one)
        await asyncio.sleep(rng.random() * 0.004)
        submitted = [name for name in leaving if int(name[1:]) <= number]
        gone = rng.sample(submitted, rng.randint(0, len(submitted)))
        leaving = [name for name in leaving if name not in gone]
        await front.dispatcher.cancel(gone)
    await front.dispatcher.cancel(leaving)
    assert await reading == all_right(stayed)
    await nothing_left(front, queue, workers)


async def test_the_choices_of_one_request_are_prefilled_once(
    front: FakeFrontend, queue: PrefillQueue, mocked: StartWorker
) -> None:
    workers = [await mocked("decode", "d0"), await mocked("decode", "d1"), await mocked(PREFILL_ROLE, "p")]
    await knows(front, 3)
    prompt = tuple(random.Random(6).choices(range(FAST.mocker_vocab_size), k=300))
    asked = {f"{n}_r": request(f"{n}_r", prompt, sampling=asking_for(9), max_tokens=9) for n in range(5)}
    for one in asked.values():
        await front.dispatcher.submit(one)
    assert await answers(front, asked) == all_right(asked)
    await nothing_left(front, queue, workers)
    assert front.remote is not None
    assert front.remote.outcomes == {"long": 5, "shared": 4, "prefilled elsewhere": 1}


async def test_a_prefill_whose_release_is_lost_is_released_at_the_next_occasion(
    front: FakeFrontend, queue: PrefillQueue, mocked: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [await mocked("decode", "d"), await mocked(PREFILL_ROLE, "p", resend_after_s=0.0)]
    await knows(front, 2)
    lost: list[RequestEpoch] = []
    publish = front.bus.publish

    async def lose_the_first_release(subject: str, data: bytes, *, reply: str = "") -> None:
        if subject == front.subjects.work("p") and not lost:
            work: Work = codec.decode(data, Work)
            assert isinstance(work, Cancel)
            lost.extend(work.requests)
            return
        await publish(subject, data, reply=reply)

    monkeypatch.setattr(front.bus, "publish", lose_the_first_release)
    asked = {"r0": request("r0", tuple(range(100)), sampling=asking_for(9), max_tokens=9)}
    await front.dispatcher.submit(asked["r0"])
    assert await answers(front, asked) == {"r0": right(asked["r0"])}
    await nothing_left(front, queue, workers)
    assert lost == [RequestEpoch("r0", 1)]


async def test_a_worker_that_changes_sides_changes_no_answer(
    front: FakeFrontend, queue: PrefillQueue, mocked: StartWorker
) -> None:
    rng = random.Random(7)
    workers = [await mocked("decode", "d"), await mocked(PREFILL_ROLE, "p")]
    changing = await mocked("decode", "changes")
    await knows(front, 3)
    asked = {one.request_id: one for one in (drawn(rng, number) for number in range(90))}
    for number, one in enumerate(asked.values()):
        await front.dispatcher.submit(one)
        if number % 15 == 14:
            turned = PREFILL_ROLE if changing.context.announcer.presence.role == "decode" else "decode"
            changing.context.announcer.update(role=turned)
            if turned == PREFILL_ROLE:
                changing.prefill.start()
            else:
                await asyncio.wait_for(changing.prefill.stop(), DEADLINE_S)
        await asyncio.sleep(0.001)
    assert await answers(front, asked) == all_right(asked)
    await nothing_left(front, queue, [*workers, changing])
