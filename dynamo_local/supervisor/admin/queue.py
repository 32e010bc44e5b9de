"""`dynamo queue`: shows and purges the prefill queues of a running server: its own model's, and those of endpoints."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, QueuedJob
from dynamo_local.core.errors import NotRunningError, QueueAbsentError
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.admin.scopes import known_revisions
from state.endpoints.board import read_board
from state.paths import StatePaths


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is shown. `state` is "waiting", or "in hand" for one that was delivered at least once. The optional
    fields are None for a message that is no job."""

    state: str
    age_s: float
    endpoint: str = ""
    """The endpoint whose prompts the queue is for; empty for the graph's own model."""
    revision: str = ""
    job: str | None = None
    request_id: str | None = None
    frontend: str | None = None
    tokens: int | None = None
    priority: int | None = None
    expires_in_s: float | None = None
    """Below 0: no decode worker waits for it any more."""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The length of all queues that were asked for, and their oldest jobs."""

    namespace: str
    waiting: int
    in_hand: int
    jobs: tuple[JobRow, ...]


async def read_queue(paths: StatePaths, limit: int, endpoint: str | None = None) -> QueueView:
    """Read the length and the `limit` oldest jobs of all queues, or of one endpoint's.

    Raises NotRunningError when there is no server, or it has no queue, and UsageError for what is no endpoint.
    """
    async with _queues_of(paths, endpoint) as queues:
        read = [await _rows(queue, limit, revision) for revision, queue in queues.items()]
        lengths = [await queue.length() for queue in queues.values()]
    return QueueView(
        namespace=paths.namespace,
        waiting=sum(length.waiting for length in lengths),
        in_hand=sum(length.in_hand for length in lengths),
        # Not sorted: within a queue the order is the queue's, however exact the ages are.
        jobs=tuple(heapq.merge(*read, key=lambda job: -job.age_s))[:limit],
    )


async def purge_queue(paths: StatePaths, endpoint: str | None = None) -> int:
    """Drop all jobs, or those of an endpoint, and return their number. Raises as `read_queue`."""
    async with _queues_of(paths, endpoint) as queues:
        return sum([await queue.purge() for queue in queues.values()])


async def _rows(queue: PrefillQueue, limit: int, revision: str) -> list[JobRow]:
    jobs = await queue.jobs(limit)
    return [row(queued, revision) for queued in jobs]


def row(queued: QueuedJob, revision: str = "") -> JobRow:
    """Make the row of a job in the queue of this revision."""
    state = "in hand" if queued.taken else "waiting"
    job = queued.job
    if job is None:
        return JobRow(state=state, age_s=round(queued.age_s, 3), endpoint=endpoint_of(revision), revision=revision)
    return JobRow(
        state=state,
        age_s=round(queued.age_s, 3),
        endpoint=endpoint_of(revision),
        revision=revision,
        job=job.job,
        request_id=job.request_id,
        frontend=job.frontend,
        tokens=job.tokens,
        priority=job.priority,
        expires_in_s=round(job.valid_s - queued.age_s, 3),
    )


@asynccontextmanager
async def _queues_of(paths: StatePaths, endpoint: str | None) -> AsyncIterator[dict[str, PrefillQueue]]:
    """The queues that there are, by revision."""
    revisions = known_revisions((), await asyncio.to_thread(read_board, paths), endpoint)
    async with bus_of(paths, "queue") as bus:
        queues = {revision: PrefillQueue(bus, Subjects(paths.namespace, revision)) for revision in revisions}
        found = {revision: queue for revision, queue in queues.items() if await _exists(queue)}
        if not found:
            whose = f"namespace {paths.namespace}" if endpoint is None else f"endpoint {endpoint}"
            raise NotRunningError(
                f"{whose} has no prefill queue", "there is one for a graph or an endpoint with prefill workers"
            )
        yield found


async def _exists(queue: PrefillQueue) -> bool:
    try:
        await queue.length()
    except QueueAbsentError:
        return False
    return True
