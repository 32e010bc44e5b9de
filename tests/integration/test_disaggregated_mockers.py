"""A frontend, a queue, mockers that prefill and mockers that decode: every answer is right, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.disaggregation import Limits
from dynamo_local.core.fidelity import Fidelity, Survival
from dynamo_local.core.fleet import PREFILL_ROLE
from dynamo_local.core.messages import Load, Submit
from dynamo_local.core.names import Subjects
from dynamo_local.core.ports import PulledPrefix, Request, Sampling
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation
from dynamo_local.runtime.bus import Bus
from dynamo_local.runtime.prefill_queue import PrefillQueue, QueueLength, create_prefill_queue
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.prefill_fakes import ENDLESS, remote_prefill
from tests.integration.worker_parts import PrefillPart, Worker, context_of

pytestmark = pytest.mark.integration

FAST = MockerSettings(mocker_speedup=200.0, mocker_block_size=8, mocker_max_num_batched_tokens=256)
LIMITS = Limits(max_local_prefill_length=40, max_prefill_queue_size=1000)


class Counting(MockerEngine):
    """Counts submissions that came with something to read."""

    reads = 0

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        self.reads += pulled is not None
        await super().submit(work, pulled)


StartWorker = Callable[[str, str], Awaitable[PrefillPart]]


@pytest.fixture
async def mocked(connect: Connect, subjects: Subjects, tmp_path: Path) -> AsyncIterator[StartWorker]:
    """Starts a worker in the given role and with the given lease."""
    workers: list[PrefillPart] = []

    async def start(role: str, lease: str) -> PrefillPart:
        context = context_of(await connect(), subjects, "VllmWorker", role, lease)
        worker = PrefillPart(context, Counting(FAST, tmp_path))
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


def asking_for(tokens: int) -> Sampling:
    def sampling(position: int, at_most: int | None = None) -> bytes:
        limit = tokens - position if at_most is None else min(at_most, tokens - position)
        return msgspec.msgpack.encode({"max_tokens": limit, "ignore_eos": True})

    return sampling


def drawn(rng: random.Random, number: int) -> Request:
    tokens = rng.randint(1, 12)
    prompt = rng.choices(range(FAST.mocker_vocab_size), k=rng.randint(1, 400))
    survival = Survival() if rng.random() < 0.8 else Survival(Fidelity.NONE, "seed")
    return request(f"r{number}", tuple(prompt), sampling=asking_for(tokens), max_tokens=tokens, survival=survival)


async def answers(front: FakeFrontend, wanted: Mapping[str, Request]) -> dict[str, list[int]]:
    """What comes until all of these have ended; every position once, in order, and every end a regular one."""
    found: dict[str, list[int]] = {name: [] for name in wanted}
    left = set(wanted)
    while left:
        outputs = await asyncio.wait_for(front.dispatcher.outputs(), DEADLINE_S)
        for delta in outputs.deltas:
            if delta.request_id in left:
                assert delta.position == len(found[delta.request_id])
                found[delta.request_id] += delta.token_ids
            if delta.finish is not None:
                assert delta.finish == "length", delta
                left.discard(delta.request_id)
    return found


def right(asked: Request) -> list[int]:
    assert asked.max_tokens is not None
    return continuation(asked.prompt_token_ids, asked.max_tokens, FAST.mocker_vocab_size)


async def nothing_left(front: FakeFrontend, queue: PrefillQueue, workers: Sequence[Worker]) -> None:
    await until(lambda: front.dispatcher.live_requests == 0)
    for worker in workers:
        await until(lambda worker=worker: len(worker.duty._outbox) == 0)  # type: ignore[misc]
        await until(lambda worker=worker: _idle(worker.context.announcer.presence.load))  # type: ignore[misc]
        assert front.local.ledger.outstanding(worker.lease) == 0
    async with asyncio.timeout(DEADLINE_S):
        while await queue.length() != QueueLength(0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _idle(load: Load | None) -> bool:
    return load is not None and (load.running, load.waiting, load.kv_usage, load.kv_pinned) == (0, 0, 0.0, 0.0)


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
    assert await answers(front, asked) == {name: right(one) for name, one in asked.items()}
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
    assert await reading == {name: right(one) for name, one in stayed.items()}
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
    assert await answers(front, asked) == {name: right(one) for name, one in asked.items()}
    await nothing_left(front, queue, workers)
    assert front.remote is not None
    assert front.remote.outcomes == {"long": 5, "shared": 4, "prefilled elsewhere": 1}


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
                await changing.prefill.stop()
        await asyncio.sleep(0.001)
    assert await answers(front, asked) == {name: right(one) for name, one in asked.items()}
    await nothing_left(front, queue, [*workers, changing])
