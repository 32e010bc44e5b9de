"""The prefill queue on a real NATS server: jobs are taken, kept alive, finished, and delivered again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from dynamo_local.bus.jetstream.prefill_queue import (
    CONSUMERS,
    LIMITS,
    PrefillConsumer,
    PrefillQueue,
    create_prefill_queue,
)
from dynamo_local.bus.nats import Bus, Handler, Subscription
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_jobs import DEADLINE_S, published, taken, waiting
from tests.integration.fleet_of_fakes import until

pytestmark = pytest.mark.integration

SHORT = replace(LIMITS, ack_wait_s=1.0)
"""A job that is not kept alive is delivered again soon."""
NEVER_AGAIN = replace(LIMITS, ack_wait_s=3600.0)
"""A job is delivered again only if it is given back."""


@pytest.fixture
async def queue(bus: Bus, subjects: Subjects) -> PrefillQueue:
    await create_prefill_queue(bus, subjects)
    return PrefillQueue(bus, subjects)


@pytest.fixture
async def hasty(bus: Bus, subjects: Subjects) -> PrefillQueue:
    """A queue that soon delivers again."""
    await create_prefill_queue(bus, subjects, SHORT)
    return PrefillQueue(bus, subjects)


@pytest.fixture
async def consumer(connect: Connect, subjects: Subjects) -> AsyncIterator[PrefillConsumer]:
    consumer = PrefillConsumer(await connect(), subjects)
    yield consumer
    await consumer.close()


# One after another


async def test_jobs_are_taken_in_order_and_leave_when_done(queue: PrefillQueue, consumer: PrefillConsumer) -> None:
    jobs = await published(queue, 3)
    assert await queue.length() == QueueLength(waiting=3, in_hand=0)
    first = await consumer.take(2, DEADLINE_S)
    assert [job.job for job in first] == jobs[:2]
    assert [job.delivery for job in first] == [1, 1]
    assert await queue.length() == QueueLength(waiting=1, in_hand=2)
    await first[0].done()
    await first[1].end("cancelled")
    assert await queue.length() == QueueLength(waiting=1, in_hand=0)
    (last,) = await consumer.take(2, DEADLINE_S)
    assert last.job == jobs[2]
    await last.done()
    assert await queue.length() == QueueLength(waiting=0, in_hand=0)


async def test_a_job_is_taken_as_soon_as_it_comes_not_when_the_batch_is_full(
    queue: PrefillQueue, consumer: PrefillConsumer
) -> None:
    taking = asyncio.create_task(consumer.take(8, 3600.0))
    (job,) = await published(queue, 1)
    async with asyncio.timeout(DEADLINE_S):
        assert [found.job for found in await taking] == [job]


async def test_without_jobs_nothing_is_taken(queue: PrefillQueue, consumer: PrefillConsumer) -> None:
    assert await consumer.take(4, 0.05) == []


async def test_who_waits_asks_once(
    queue: PrefillQueue, bus: Bus, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class of priority whether there are jobs, whether one comes, and once more in the end."""
    asked: list[str] = []
    publish = bus.publish

    async def noting(subject: str, data: bytes, *, reply: str = "") -> None:
        asked.append(subject)
        await publish(subject, data, reply=reply)

    monkeypatch.setattr(bus, "publish", noting)
    consumer = PrefillConsumer(bus, subjects)
    assert await consumer.take(4, 2.5) == []
    assert len(asked) <= 3 * len(CONSUMERS)
    await consumer.close()


async def test_a_connection_that_ends_as_a_worker_begins_to_wait_brings_no_jobs(
    queue: PrefillQueue, connect: Connect, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect()
    consumer = PrefillConsumer(bus, subjects)
    assert await consumer.take(1, 0.05) == []
    subscribe = bus.subscribe

    async def ending(subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        await bus.close()
        return await subscribe(subject, handler, queue=queue)

    monkeypatch.setattr(bus, "subscribe", ending)
    assert await consumer.take(1, 0.3) == []
    assert not bus.connected


async def test_takers_share_the_jobs(queue: PrefillQueue, connect: Connect, subjects: Subjects) -> None:
    jobs = await published(queue, 40)
    consumers = [PrefillConsumer(await connect(), subjects) for _ in range(3)]
    seen: list[str] = []

    async def work(consumer: PrefillConsumer) -> None:
        while len(seen) < len(jobs):
            for found in await consumer.take(4, 0.1):
                seen.append(found.job.job)
                await found.done()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(work, consumers))
    assert sorted(seen) == sorted(job.job for job in jobs)
    assert await queue.length() == QueueLength(0, 0)
    for consumer in consumers:
        await consumer.close()


# Priorities


async def test_urgent_jobs_are_taken_first_and_background_work_gets_its_share(
    queue: PrefillQueue, consumer: PrefillConsumer
) -> None:
    background = await published(queue, 3, priority=5)
    normal = await published(queue, 25)
    urgent = await published(queue, 2, priority=-1)
    found: list[str] = []
    while len(found) < len(background + normal + urgent):
        for job in await taken(consumer, batch=4):
            found.append(job.job.job)
            await job.done()
    assert found[:2] == [job.job for job in urgent]
    assert found[2:18] == [job.job for job in normal[:16]]
    assert background[0].job in found[18:20]
    assert found[-2:] == [job.job for job in background[1:]]
    assert await queue.length() == QueueLength(0, 0)


async def test_a_consumer_that_has_got_a_job_waits_for_no_other(
    bus: Bus, consumer: PrefillConsumer, connect: Connect, subjects: Subjects
) -> None:
    await create_prefill_queue(bus, subjects, NEVER_AGAIN)
    queue = PrefillQueue(bus, subjects)
    taking = asyncio.create_task(consumer.take(1, DEADLINE_S))
    await waiting(bus, subjects)
    (urgent,) = await published(queue, 1, priority=-1)
    assert [found.job for found in await taking] == [urgent]
    # Its requests for jobs of other classes have ended, and these go to whoever asks.
    later = [*await published(queue, 1), *await published(queue, 1, priority=1)]
    other = PrefillConsumer(await connect(), subjects)
    found = await other.take(2, DEADLINE_S)
    assert [(job.job, job.delivery) for job in found] == [(job, 1) for job in later]
    await other.close()


# Coming again


async def test_a_job_given_back_comes_again_at_once(queue: PrefillQueue, consumer: PrefillConsumer) -> None:
    (job,) = await published(queue, 1)
    for delivery in (1, 2, 3):
        (found,) = await taken(consumer)
        assert (found.job, found.delivery) == (job, delivery)
        await found.give_back()


async def test_the_job_of_a_consumer_that_dies_comes_again(
    hasty: PrefillQueue, connect: Connect, consumer: PrefillConsumer, subjects: Subjects
) -> None:
    (job,) = await published(hasty, 1)
    dying = await connect()
    await taken(PrefillConsumer(dying, subjects))
    await dying.close()
    (found,) = await taken(consumer)
    assert (found.job, found.delivery) == (job, 2)


async def test_a_job_that_is_kept_alive_does_not_come_again(
    bus: Bus, consumer: PrefillConsumer, connect: Connect, subjects: Subjects
) -> None:
    await create_prefill_queue(bus, subjects, replace(LIMITS, ack_wait_s=1.0))
    await published(PrefillQueue(bus, subjects), 1)
    (mine,) = await taken(consumer)

    async def keep() -> None:
        while True:
            await mine.keep_alive()
            await asyncio.sleep(0.02)

    keeping = asyncio.create_task(keep())
    other = PrefillConsumer(await connect(), subjects)
    assert await other.take(1, 2.5) == []
    keeping.cancel()
    (again,) = await taken(other)
    assert again.delivery == 2
    await other.close()


async def test_a_job_that_was_done_after_it_came_again_is_done(
    hasty: PrefillQueue, consumer: PrefillConsumer, connect: Connect, subjects: Subjects
) -> None:
    """A slow consumer's word counts, whoever has the job now."""
    await published(hasty, 1)
    (slow,) = await taken(consumer)
    other = PrefillConsumer(await connect(), subjects)
    (again,) = await taken(other)
    await slow.done()
    await again.done()
    assert await hasty.length() == QueueLength(0, 0)
    await other.close()


@pytest.mark.parametrize("arrives", ["before it is cancelled", "before it is closed"])
async def test_what_a_consumer_has_not_handed_out_is_given_back_when_it_closes(
    bus: Bus, consumer: PrefillConsumer, connect: Connect, subjects: Subjects, arrives: str
) -> None:
    await create_prefill_queue(bus, subjects, NEVER_AGAIN)
    taking = asyncio.create_task(consumer.take(1, 3600.0))
    await waiting(bus, subjects)
    if arrives == "before it is closed":
        taking.cancel()
    (job,) = await published(PrefillQueue(bus, subjects), 1)
    if arrives == "before it is closed":
        await until(lambda: bool(consumer._arrived))
    taking.cancel()
    await asyncio.wait({taking})
    if not taking.cancelled():
        await taking.result()[0].give_back()
    await consumer.close()
    other = PrefillConsumer(await connect(), subjects)
    (found,) = await taken(other)
    assert found.job == job
    await other.close()


async def test_a_consumer_that_was_closed_can_take_again(queue: PrefillQueue, consumer: PrefillConsumer) -> None:
    await published(queue, 2)
    (first,) = await taken(consumer)
    await consumer.close()
    await first.done()
    (second,) = await taken(consumer)
    await second.done()
    assert await queue.length() == QueueLength(0, 0)


# Looking at it


async def test_jobs_can_be_looked_at_without_taking_them(queue: PrefillQueue, consumer: PrefillConsumer) -> None:
    jobs = await published(queue, 4)
    (_, second) = await consumer.take(2, DEADLINE_S)
    await second.done()
    assert [(found.job, found.taken) for found in await queue.jobs(10)] == [
        (jobs[0], True),
        (jobs[2], False),
        (jobs[3], False),
    ]
    assert [found.job for found in await queue.jobs(1)] == [jobs[0]]
    assert await queue.length() == QueueLength(waiting=2, in_hand=1)


async def test_a_purge_drops_all_jobs_and_who_has_one_may_finish(
    queue: PrefillQueue, consumer: PrefillConsumer
) -> None:
    await published(queue, 3)
    (mine,) = await taken(consumer)
    assert await queue.purge() == 3
    assert await queue.purge() == 0
    assert await queue.length() == QueueLength(0, 0)
    await mine.keep_alive()
    await mine.done()
    (job,) = await published(queue, 1)
    assert [found.job for found in await taken(consumer)] == [job]
