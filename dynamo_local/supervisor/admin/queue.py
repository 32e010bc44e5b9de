"""`dynamo queue`: shows and purges the prefill queue of a running server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dynamo_local.bus.prefill_queue import PrefillQueue, QueuedJob
from dynamo_local.core.errors import NotRunningError, QueueAbsentError
from dynamo_local.core.names import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
from state.paths import StatePaths


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is shown. `state` is "waiting", or "in hand" for one that was delivered at least once. The optional
    fields are None for a message that is no job."""

    state: str
    age_s: float
    job: str | None = None
    request_id: str | None = None
    frontend: str | None = None
    tokens: int | None = None
    expires_in_s: float | None = None
    """Below 0: no decode worker waits for it any more."""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The queue's length, and its oldest jobs."""

    namespace: str
    waiting: int
    in_hand: int
    jobs: tuple[JobRow, ...]


async def read_queue(paths: StatePaths, limit: int) -> QueueView:
    """Read the queue's length and its `limit` oldest jobs. Raises NotRunningError when there is no server, or it has no
    queue."""
    async with _queue_of(paths) as queue:
        length = await queue.length()
        jobs = await queue.jobs(limit)
    now = time.monotonic()
    return QueueView(
        namespace=paths.namespace,
        waiting=length.waiting,
        in_hand=length.in_hand,
        jobs=tuple(row(queued, now) for queued in jobs),
    )


async def purge_queue(paths: StatePaths) -> int:
    """Drop all jobs, and return their number. Raises as `read_queue`."""
    async with _queue_of(paths) as queue:
        return await queue.purge()


def row(queued: QueuedJob, now: float) -> JobRow:
    """Make the row of a job. `now` is CLOCK_MONOTONIC, as are the deadlines of jobs."""
    state = "in hand" if queued.taken else "waiting"
    job = queued.job
    if job is None:
        return JobRow(state=state, age_s=round(queued.age_s, 3))
    return JobRow(
        state=state,
        age_s=round(queued.age_s, 3),
        job=job.job,
        request_id=job.request_id,
        frontend=job.frontend,
        tokens=job.tokens,
        expires_in_s=round(job.deadline - now, 3),
    )


@asynccontextmanager
async def _queue_of(paths: StatePaths) -> AsyncIterator[PrefillQueue]:
    try:
        async with bus_of(paths, "queue") as bus:
            yield PrefillQueue(bus, Subjects(paths.namespace))
    except QueueAbsentError as error:
        raise NotRunningError(error.cause, error.remedy) from error
