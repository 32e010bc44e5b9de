"""Decides whether a prompt is worth a prefill job, and publishes the job. What becomes of the job and of its request is
in remote_prefill.py."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion
from dynamo_local.core.messages.prefill import PrefillClaim, PrefillJob
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.ports import Request
from dynamo_local.core.priority.classes import PriorityClass, ahead_of, class_of
from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.core.request.disaggregation import JobTurns, PrefillLimits, PrefillReason, decide, worth_asking
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

_CACHED_TIMEOUT_S = 2.0
"""Until a decode worker has answered how much it has cached, which it does between two engine steps."""

_LENGTH_AGE_S = 0.25
"""Age up to which a reading of the queue's length is used again."""

HOLD_S = 60.0
"""For so long a prefill worker keeps the blocks of a finished prefill, if no decode worker pulls them."""


@dataclass(frozen=True)
class PrefillDeadlines:
    """Limits of remote prefill: seconds until a job ends, and how often it is tried."""

    in_queue_s: float = 10.0
    """Until a prefill worker has claimed the job. After that the decode worker computes the prompt."""
    at_work_s: float = 120.0
    """From the claim until the prompt is computed: far more than any worker takes that is not stuck."""
    jobs: int = 2
    """Jobs of one request at most: a job that is lost with its prefill worker may be followed by another."""
    deliveries: int = 3
    """Deliveries of one job at most."""


@dataclass(eq=False)
class Job:
    """A prompt in the prefill queue, or at the prefill worker that claimed it. Several requests may wait for one
    job."""

    id: str
    """Of the job in the queue that stands for it now: two prompts that wait may change places."""
    request_id: str
    """The request that the prefill worker is given."""
    deadline: float
    """When the job ends if it is not claimed, and after the claim, if it is not computed (CLOCK_MONOTONIC, s)."""
    granted: RequestEpoch | None = None
    """The epoch under which the last claim was granted."""
    claims: int = 0
    """Number of claims. (NATS counts deliveries, but starts again from one when it is restarted.)"""
    priority: int = 0
    """Priority of the request for which it was published: its place in the queue."""
    tokens: int = 0
    """Length of the prompt."""


@dataclass(frozen=True)
class Held:
    """A finished prefill: the worker that keeps its KV until the epoch is cancelled, and that epoch."""

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
    """The prefill jobs of one frontend."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        fleet: FleetWatch,
        limits: Callable[[], PrefillLimits],
        deadlines: PrefillDeadlines | None = None,
    ) -> None:
        """`lease` is the frontend's own. `limits` returns the limits that hold now."""
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._limits = limits
        self.deadlines = deadlines or PrefillDeadlines()
        self._queue = PrefillQueue(bus, subjects)
        self.turns = JobTurns[Job](lambda job: job.tokens)
        """The jobs that wait in the queue, as far as it has confirmed them."""
        self._arrivals = itertools.count()
        self._lengths: tuple[float, dict[PriorityClass, int] | None] = (0.0, None)
        self._reading = asyncio.Lock()
        self.outcomes: Counter[str] = Counter()
        """Number of decisions by reason, and of jobs by their ends."""

    async def wanted(self, request: Request, decode: str, *, queued: bool = False) -> bool:
        """Return whether the request is to be prefilled by another worker than its decode worker.

        `queued`: there is a job for its prompt already, so that the queue does not grow.
        """
        limits, tokens = self._limits(), len(request.prompt_token_ids)
        if not request.prefill_elsewhere:
            return False
        if not worth_asking(tokens, limits):
            self.outcomes[PrefillReason.SHORT] += 1
            return False
        workers = len(self._fleet.view.routable((PREFILL_ROLE,)))
        waiting = await self._waiting(request) if workers and not queued else 0
        # The question costs the decode worker time, so it is asked only if the answer matters.
        decision = decide(tokens, 0, waiting, workers, limits)
        if decision.remote:
            cached = await self._cached(request, decode)
            # Other jobs may have been published meanwhile.
            decision = decide(tokens, cached, 0 if queued else await self._waiting(request), workers, limits)
        self.outcomes[decision.reason] += 1
        return decision.remote

    def job_for(self, request: Request) -> Job:
        """Return a new job for the request, not published yet."""
        _, waiting = self._lengths
        if waiting is not None:
            # Many jobs may be published between two readings, so each is counted here.
            waiting[class_of(request.priority)] += 1
        deadline, tokens = time.monotonic() + self.deadlines.in_queue_s, len(request.prompt_token_ids)
        return Job(uuid4().hex, request.request_id, deadline, priority=request.priority, tokens=tokens)

    async def publish(self, request: Request, job: Job) -> None:
        """Put the job into the prefill queue. Raises BusError."""
        valid_s = job.deadline - time.monotonic()
        await self._queue.publish(
            PrefillJob(job.id, request.request_id, self._lease, job.tokens, valid_s, request.priority)
        )

    def take_turns(self, request: Request, job: Job) -> None:
        """Have keys take turns at the job, which the queue has confirmed and nobody has claimed."""
        claim = Claim(request.priority, request.arrival_time, next(self._arrivals), request.key)
        self.turns.add(job, claim)

    async def answer_claims(self, handler: Callable[[PrefillClaim, Answer], Awaitable[None]]) -> None:
        """Have `handler` answer each claim of this frontend's requests."""
        await self._bus.serve(self._subjects.claims(self._lease), PrefillClaim, handler)

    async def _cached(self, request: Request, decode: str) -> int | None:
        question = CachedQuestion(list(request.prompt_token_ids), request.cache_salt, request.adapter)
        try:
            subject = self._subjects.cached(decode)
            return (await self._bus.ask(subject, question, CachedAnswer, timeout_s=_CACHED_TIMEOUT_S)).tokens
        except (BusError, DecodeError) as error:
            _log.warning("worker %s does not say how much of a prompt it has cached: %s", decode, error)
            return None

    async def _waiting(self, request: Request) -> int | None:
        """Jobs that go before one of this request; None if that is not known. Those of the other frontends count in
        full: keys take turns at each frontend."""
        async with self._reading:
            read_at, waiting = self._lengths
            if time.monotonic() - read_at > _LENGTH_AGE_S:
                waiting = await self._read_lengths()
                self._lengths = (time.monotonic(), waiting)
        if waiting is None:
            return None
        *higher, own = ahead_of(class_of(request.priority))
        elsewhere = max(0, waiting[own] - self.turns.of(own))
        return sum(waiting[one] for one in higher) + elsewhere + self.turns.before(own, request.key)

    async def _read_lengths(self) -> dict[PriorityClass, int] | None:
        try:
            return await self._queue.waiting()
        except BusError as error:
            _log.warning("the length of the prefill queue is unknown: %s", error)
            return None
