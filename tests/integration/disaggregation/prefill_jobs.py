"""Prefill jobs for tests: publish some, take some, and wait for what the queue says."""

from __future__ import annotations

import asyncio
import itertools

from dynamo_local.bus.jetstream.prefill_queue import CONSUMERS, PrefillConsumer, PrefillQueue, TakenJob
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.subjects import Subjects

DEADLINE_S = 60.0

_numbers = itertools.count(1)


def some_job(priority: int = 0) -> PrefillJob:
    number = next(_numbers)
    return PrefillJob(f"job-{number}", f"request-{number}", "frontend", 100, 60.0, priority)


async def published(queue: PrefillQueue, count: int, priority: int = 0) -> list[PrefillJob]:
    jobs = [some_job(priority) for _ in range(count)]
    for job in jobs:
        await queue.publish(job)
    return jobs


async def taken(consumer: PrefillConsumer, batch: int = 1) -> list[TakenJob]:
    """The next jobs; an assertion if none come."""
    found = await consumer.take(batch, DEADLINE_S)
    assert found
    return found


async def reached(queue: PrefillQueue, length: QueueLength) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await queue.length() == length:
                return
            await asyncio.sleep(0.01)


async def waiting(bus: Bus, subjects: Subjects) -> None:
    """Until a consumer's pull waits at the server."""
    context = bus.jetstream(timeout_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            infos = [await context.consumer_info(subjects.prefill_stream, name) for name in CONSUMERS.values()]
            if all(info.num_waiting for info in infos):
                return
            await asyncio.sleep(0.005)
