"""Remote prefill, as a frontend needs it of others: what the decode worker has cached, how long the queue is, and a
place in it. What becomes of the request is prefill_jobs.py's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.prefill_queue import PrefillQueue
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion
from dynamo_local.core.messages.prefill import PrefillClaim, PrefillJob
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.names import Subjects
from dynamo_local.core.ports import Request
from dynamo_local.core.request.disaggregation import PrefillLimits, PrefillReason, decide, worth_asking

_log = logging.getLogger(__name__)

_CACHED_TIMEOUT_S = 2.0
"""A worker answers between two engine steps."""

_LENGTH_AGE_S = 0.25
"""A reading of the queue's length is good for so long."""

HOLD_S = 60.0
"""How long a prefill worker keeps the blocks of a finished prefill for a decode worker that does not come."""


@dataclass(frozen=True)
class PrefillDeadlines:
    """How long a frontend waits for remote prefill, in seconds, and how often it tries."""

    in_queue_s: float = 10.0
    """For a worker to claim the job. Then the decode worker prefills."""
    at_work_s: float = 120.0
    """For that worker to compute the prompt, beside others it has: far more than any takes that is not stuck."""
    jobs: int = 2
    """Jobs for one request: of these, all but the last were lost with a prefill worker."""
    deliveries: int = 3
    """Of one job, before it is ended."""


@dataclass
class Job:
    """A request in the prefill queue, or with the prefill worker that claimed it. Other requests may wait for it."""

    id: str
    request_id: str
    deadline: float
    """For the job to be claimed; and from then on, for the prompt to be computed."""
    granted: RequestEpoch | None = None
    claims: int = 0
    """How often it was claimed. (NATS counts deliveries, but may begin anew when it is restarted.)"""


@dataclass(frozen=True)
class Held:
    """A finished prefill, kept by its worker until it is told that the decode worker has taken over."""

    worker: str
    request: RequestEpoch


@dataclass
class PrefillRecord:
    """The remote prefill of one request. Written by remote_prefill.py."""

    decode_worker: str | None = None
    """Lease of the worker that the request is charged to, while another worker is to prefill the prompt."""
    job: Job | None = None
    """The job that the request waits for. Requests with the same prompt may wait for one job."""
    jobs: int = 0
    """Number of jobs that the request has waited for."""
    held: Held | None = None
    """A finished prefill of the prompt, to be pulled by the decode worker."""


class PrefillJobs:
    """Decides and publishes for one frontend. `limits` gives the limits that hold now."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        fleet: FleetWatch,
        limits: Callable[[], PrefillLimits],
        deadlines: PrefillDeadlines | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._limits = limits
        self.deadlines = deadlines or PrefillDeadlines()
        self._queue = PrefillQueue(bus, subjects)
        self._length: tuple[float, int | None] = (0.0, None)
        self._reading = asyncio.Lock()
        self.outcomes: Counter[str] = Counter()
        """Where prompts are prefilled, by reason; and what became of jobs."""

    async def wanted(self, request: Request, decode: str, *, queued: bool = False) -> bool:
        """Whether the request is to be prefilled elsewhere than at its decode worker. `queued`: there is a job for its
        prompt already."""
        limits, tokens = self._limits(), len(request.prompt_token_ids)
        if not request.prefill_elsewhere:
            return False
        if not worth_asking(tokens, limits):
            self.outcomes[PrefillReason.SHORT] += 1
            return False
        workers = len(self._fleet.view.routable((PREFILL_ROLE,)))
        waiting = await self._waiting() if workers and not queued else 0
        # The decode worker, which has other things to do, is asked only if nothing else speaks against it.
        decision = decide(tokens, 0, waiting, workers, limits)
        if decision.remote:
            cached = await self._cached(request, decode)
            # Others may have joined the queue meanwhile.
            decision = decide(tokens, cached, 0 if queued else await self._waiting(), workers, limits)
        self.outcomes[decision.reason] += 1
        return decision.remote

    def job_for(self, request: Request) -> Job:
        """A new job, not published yet."""
        read_at, waiting = self._length
        if waiting is not None:
            # Many requests may come between two readings.
            self._length = read_at, waiting + 1
        return Job(uuid4().hex, request.request_id, time.monotonic() + self.deadlines.in_queue_s)

    async def publish(self, request: Request, job: Job) -> None:
        """Offer the request to the prefill workers. Raises BusError."""
        await self._queue.publish(
            PrefillJob(job.id, request.request_id, self._lease, len(request.prompt_token_ids), job.deadline)
        )

    async def answer_claims(self, handler: Callable[[PrefillClaim, Answer], Awaitable[None]]) -> None:
        """Have `handler` answer each claim of this frontend's requests."""
        await self._bus.serve(self._subjects.claims(self._lease), PrefillClaim, handler)

    async def _cached(self, request: Request, decode: str) -> int | None:
        question = CachedQuestion(list(request.prompt_token_ids), request.cache_salt, request.adapter)
        try:
            subject = self._subjects.cached(decode)
            return (await self._bus.ask(subject, question, CachedAnswer, timeout_s=_CACHED_TIMEOUT_S)).tokens
        except (BusError, DecodeError) as error:
            _log.warning("what %s has cached is unknown: %s", decode, error)
            return None

    async def _waiting(self) -> int | None:
        async with self._reading:
            read_at, waiting = self._length
            if time.monotonic() - read_at > _LENGTH_AGE_S:
                waiting = await self._read_length()
                self._length = (time.monotonic(), waiting)
            return waiting

    async def _read_length(self) -> int | None:
        try:
            return (await self._queue.length()).waiting
        except BusError as error:
            _log.warning("the length of the prefill queue is unknown: %s", error)
            return None
