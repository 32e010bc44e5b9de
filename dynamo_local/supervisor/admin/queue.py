"""Shows and purges the prefill queues: that of the server's own model, and those of endpoints."""

from __future__ import annotations

import heapq
from typing import Any

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, QueuedJob
from dynamo_local.control.answers import JobRow, QueueView, same_fields
from dynamo_local.core.errors import NotRunningError, QueueAbsentError
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.scopes import known_revisions


async def read_queue(server: AskedServer, limit: int, endpoint: str | None = None) -> QueueView:
    """Read the length and the `limit` oldest jobs of all queues, or of one endpoint's.

    Raises NotRunningError when there is no queue, UsageError for what is no endpoint, SupervisorError, BusError.
    """
    queues = await _queues_of(server, endpoint)
    read = [await _rows(queue, limit, revision) for revision, queue in queues.items()]
    lengths = [await queue.length() for queue in queues.values()]
    return QueueView(
        namespace=server.paths.namespace,
        waiting=sum(length.waiting for length in lengths),
        in_hand=sum(length.in_hand for length in lengths),
        # Not sorted: within a queue the order is the queue's, however exact the ages are.
        jobs=tuple(heapq.merge(*read, key=lambda job: -job.age_s))[:limit],
    )


async def purge_queue(server: AskedServer, endpoint: str | None = None) -> int:
    """Drop all jobs, or those of an endpoint, and return their number. Raises as `read_queue`."""
    return sum([await queue.purge() for queue in (await _queues_of(server, endpoint)).values()])


async def _rows(queue: PrefillQueue, limit: int, revision: str) -> list[JobRow]:
    jobs = await queue.jobs(limit)
    return [row(queued, revision) for queued in jobs]


def row(queued: QueuedJob, revision: str = "") -> JobRow:
    """Make the row of a job in the queue of this revision."""
    state, age_s = "in hand" if queued.taken else "waiting", round(queued.age_s, 3)
    known: dict[str, Any] = {"state": state, "age_s": age_s, "endpoint": endpoint_of(revision), "revision": revision}
    if queued.job is not None:
        expires_in_s = round(queued.job.valid_s - queued.age_s, 3)
        known = {**same_fields(queued.job, JobRow), **known, "expires_in_s": expires_in_s}
    return JobRow(**known)


async def _queues_of(server: AskedServer, endpoint: str | None) -> dict[str, PrefillQueue]:
    """The queues that there are, by revision."""
    bus, namespace = await server.bus(), server.paths.namespace
    revisions = known_revisions((), await server.board(), endpoint)
    queues = {revision: PrefillQueue(bus, Subjects(namespace, revision)) for revision in revisions}
    found = {revision: queue for revision, queue in queues.items() if await _exists(queue)}
    if not found:
        whose = f"namespace {namespace}" if endpoint is None else f"endpoint {endpoint}"
        raise NotRunningError(
            f"{whose} has no prefill queue", "there is one for a graph or an endpoint with prefill workers"
        )
    return found


async def _exists(queue: PrefillQueue) -> bool:
    try:
        await queue.length()
    except QueueAbsentError:
        return False
    return True
