"""The prefill queue on a real NATS server when not all is well: garbage, a full queue, no queue, a server that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from dynamo_local.bus.jetstream.prefill_queue import (
    LIMITS,
    PrefillConsumer,
    PrefillQueue,
    create_prefill_queue,
    delete_prefill_queue,
)
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, QueueAbsentError, QueueFullError
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_jobs import DEADLINE_S, published, reached, some_job, waiting
from tests.integration.fleet_of_fakes import until
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration


@pytest.fixture
async def queue(bus: Bus, subjects: Subjects) -> PrefillQueue:
    await create_prefill_queue(bus, subjects)
    return PrefillQueue(bus, subjects)


@pytest.fixture
async def consumer(connect: Connect, subjects: Subjects) -> AsyncIterator[PrefillConsumer]:
    consumer = PrefillConsumer(await connect(), subjects)
    yield consumer
    await consumer.close()


# Garbage, and too much


async def test_garbage_is_dropped_and_counted_and_hurts_nobody(
    queue: PrefillQueue, consumer: PrefillConsumer, bus: Bus, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = [b"", b"\xc1", b"{}", msgspec.msgpack.encode((99, some_job()))]
    for data in garbage:
        await bus.request(subjects.prefill_jobs("normal"), data, timeout_s=DEADLINE_S)
    assert [found.job for found in await queue.jobs(10)] == [None] * len(garbage)
    (job,) = await published(queue, 1)
    async with asyncio.timeout(DEADLINE_S):
        (found,) = await consumer.take(1, DEADLINE_S)
    assert found.job == job
    assert consumer.garbage == len(garbage)
    assert "version 99" in caplog.text
    await found.done()
    await reached(queue, QueueLength(0, 0))


async def test_a_full_queue_says_so_and_loses_nothing(bus: Bus, subjects: Subjects, consumer: PrefillConsumer) -> None:
    await create_prefill_queue(bus, subjects, replace(LIMITS, messages=2))
    queue = PrefillQueue(bus, subjects)
    jobs = await published(queue, 2)
    with pytest.raises(QueueFullError, match="no more jobs"):
        await queue.publish(some_job())
    assert [found.job for found in await consumer.take(5, DEADLINE_S)] == jobs


async def test_a_job_too_large_is_refused(queue: PrefillQueue) -> None:
    with pytest.raises(BusError) as failure:
        await queue.publish(msgspec.structs.replace(some_job(), request_id="x" * LIMITS.message_bytes))
    assert not isinstance(failure.value, QueueFullError | QueueAbsentError)
    assert await queue.length() == QueueLength(0, 0)


# No queue


async def test_without_a_queue_everybody_is_told_and_nobody_creates_one(
    bus: Bus, subjects: Subjects, consumer: PrefillConsumer
) -> None:
    queue = PrefillQueue(bus, subjects)
    for use in (queue.publish(some_job()), queue.length(), queue.jobs(1), queue.purge(), consumer.take(1, 0.2)):
        with pytest.raises(QueueAbsentError, match=f"{subjects.namespace} has no prefill queue"):
            await use
    with pytest.raises(QueueAbsentError):
        await queue.length()


async def test_while_there_is_no_queue_the_server_is_not_asked_without_pause(consumer: PrefillConsumer) -> None:
    sent = consumer._bus._client.stats
    before = sent["out_msgs"]
    with pytest.raises(QueueAbsentError):
        await consumer.take(1, 1.0)
    assert 0 < sent["out_msgs"] - before <= 10


async def test_a_queue_that_comes_while_it_is_waited_for_is_used(
    bus: Bus, subjects: Subjects, consumer: PrefillConsumer
) -> None:
    taking = asyncio.create_task(consumer.take(1, DEADLINE_S))
    with pytest.raises(QueueAbsentError):
        await PrefillQueue(bus, subjects).length()
    await create_prefill_queue(bus, subjects)
    (job,) = await published(PrefillQueue(bus, subjects), 1)
    assert [found.job for found in await taking] == [job]


async def test_a_queue_that_goes_while_it_is_waited_for_is_told(
    queue: PrefillQueue, bus: Bus, subjects: Subjects, consumer: PrefillConsumer
) -> None:
    taking = asyncio.create_task(consumer.take(1, 2.0))
    await waiting(bus, subjects)
    assert await delete_prefill_queue(bus, subjects)
    assert not await delete_prefill_queue(bus, subjects)
    with pytest.raises(QueueAbsentError):
        await taking


# Its owner


async def test_an_owner_starts_with_an_empty_queue(queue: PrefillQueue, bus: Bus, subjects: Subjects) -> None:
    await published(queue, 3)
    await create_prefill_queue(bus, subjects)
    assert await queue.length() == QueueLength(0, 0)


async def test_a_stream_of_somebody_else_is_left_alone(bus: Bus, subjects: Subjects) -> None:
    theirs = bus.jetstream(timeout_s=DEADLINE_S)
    await theirs.add_stream(name=subjects.prefill_stream, subjects=[f"{subjects.namespace}.theirs"])
    for use in (create_prefill_queue(bus, subjects), delete_prefill_queue(bus, subjects)):
        with pytest.raises(BusError, match="has not made"):
            await use
    assert (await theirs.stream_info(subjects.prefill_stream)).config.subjects == [f"{subjects.namespace}.theirs"]


# A server that goes and comes back


async def test_jobs_outlive_the_server_those_in_hand_too(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    await create_prefill_queue(bus, subjects, replace(LIMITS, ack_wait_s=1.0))
    queue, consumer = PrefillQueue(bus, subjects), PrefillConsumer(bus, subjects)
    jobs = await published(queue, 4)
    lost, kept = await consumer.take(2, DEADLINE_S)
    own_nats.kill()
    await until(lambda: not bus.connected)
    assert await consumer.take(1, 0.2) == []
    for use in (queue.publish(some_job()), queue.length(), queue.purge()):
        with pytest.raises(BusError, match="is down"):
            await use
    taking = asyncio.create_task(consumer.take(4, DEADLINE_S))
    own_nats.start()
    left = await taking
    await kept.done()
    seen: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while await queue.length() != QueueLength(0, 0):
            for found in left:
                seen.add(found.job.job)
                await found.done()
            left = await consumer.take(4, 0.5)
    # A server that is killed may not remember what it had delivered: what was in hand can come again, also at once.
    assert seen - {kept.job.job} == {lost.job.job, jobs[2].job, jobs[3].job}
    await bus.close()


async def test_a_server_that_goes_while_a_consumer_waits_is_waited_for(
    own_nats: NatsProcess, subjects: Subjects
) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    await create_prefill_queue(bus, subjects)
    consumer = PrefillConsumer(bus, subjects)
    taking = asyncio.create_task(consumer.take(1, DEADLINE_S))
    await waiting(bus, subjects)
    for _ in range(2):
        own_nats.kill()
        await until(lambda: not bus.connected)
        own_nats.start()
        await until(lambda: bus.connected)
    (job,) = await published(PrefillQueue(bus, subjects), 1)
    assert [found.job for found in await taking] == [job]
    await bus.close()


async def test_a_word_that_nobody_hears_is_no_error(
    own_nats: NatsProcess, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    await create_prefill_queue(bus, subjects)
    await published(PrefillQueue(bus, subjects), 3)
    done, ended, back = await PrefillConsumer(bus, subjects).take(3, DEADLINE_S)
    own_nats.kill()
    await until(lambda: not bus.connected)
    await done.keep_alive()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(done.done(), ended.end("expired"), back.give_back())
    assert caplog.text.count("may come again") == 3
    await bus.close()
