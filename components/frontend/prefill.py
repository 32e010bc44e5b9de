"""Has prompts computed by prefill workers. A request passes through three states:

    offered    its job is in the prefill queue, it is charged to its decode worker, and no worker computes it
    granted    a prefill worker has claimed the job, and has the request under an epoch of its own
    held       the first token has arrived, the prefill worker keeps the KV, and the decode worker has the request
               under the next epoch

Keys take turns at jobs that are offered: the request that is granted is the one whose turn it is, and the one whose job
was claimed gets the other's job (core/request/disaggregation.py).

Each state may end at any time; the request then goes to its decode worker as if there were no prefill workers. A claim
of the job after that is refused.

Requests with the same prompt that arrive while one is offered or granted (such as the choices of a request with n > 1),
and are no more urgent than that one, share its job: they wait for the KV, and their own decode workers sample their
first tokens from it. If the job fails, they are offered again, or placed without a prefill.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import msgspec

from components.frontend.placing import Placer
from components.frontend.requests.live_requests import Held, Job, LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion
from dynamo_local.core.messages.work import PrefillClaim, PrefillGrant, PrefillJob, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.priority.classes import PriorityClass, ahead_of, class_of
from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.core.request.disaggregation import JobTurns, PrefillLimits, PrefillReason, decide, worth_asking
from dynamo_local.core.request.log import Verdict
from dynamo_local.core.request.recovery import Fidelity
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


# Whether a prompt is worth a prefill job, and the publishing of the job.

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

    async def answer_claims(self, handler: Callable[[PrefillClaim], Awaitable[PrefillGrant]]) -> None:
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


# What becomes of the job and of its request (see above).


Place = Callable[[LiveRequest, str | None], Coroutine[Any, Any, None]]
"""Gives a request to a worker: to that of this lease, if it still takes requests. Never raises."""


class RemotePrefill:
    """Has prompts of one frontend's requests computed by prefill workers."""

    def __init__(
        self,
        requests: LiveRequests,
        placer: Placer,
        place: Place,
        link: WorkerLink,
        tasks: TaskGuard,
        jobs: PrefillJobs | None,
    ) -> None:
        """`jobs`: None if the graph has no prefill workers. No request is ever offered then."""
        self._requests = requests
        self._placer = placer
        self._place = place
        self._link = link
        self._tasks = tasks
        self._jobs = jobs
        self._deadlines = PrefillDeadlines() if jobs is None else jobs.deadlines
        self._outcomes = Counter[str]() if jobs is None else jobs.outcomes
        self._by_id = WeakValueDictionary[str, Job]()
        """The jobs that requests wait for, by what they are called in the queue."""

    async def start(self) -> None:
        """Begin to answer claims."""
        if self._jobs is not None:
            await self._jobs.answer_claims(self._on_claim)

    async def offer(self, live: LiveRequest, decode_worker: str) -> bool:
        """Put the request into the prefill queue, if that is worth it. The request stays charged to `decode_worker`.

        Return whether the request is taken care of; otherwise it is to be given to its decode worker.
        """
        jobs, request, prefill = self._jobs, live.request, live.prefill
        if jobs is None or live.log.position > 0 or prefill.held is not None or prefill.jobs >= self._deadlines.jobs:
            return False
        queued = self._job_for(request) is not None
        if not await jobs.wanted(request, decode_worker, queued=queued) or not self._requests.is_live(live):
            return False
        prefill.decode_worker = decode_worker
        prefill.jobs += 1
        if (shared := self._job_for(request)) is not None:
            self._outcomes["shared"] += 1
            prefill.job = shared
            return True
        # Set before the job is published: the claim may arrive before the queue's confirmation.
        job = prefill.job = jobs.job_for(request)
        self._by_id[job.id] = job
        try:
            await jobs.publish(request, job)
        except BusError as error:
            _log.warning("request %s is left to its own worker, without a prefill worker: %s", live.request_id, error)
            return not self._unpublished(live, job)
        if live.prefill.job is job and job.granted is None:
            jobs.take_turns(request, job)
        return True

    def take(self, live: LiveRequest, delta: TokenDelta) -> TokenDelta | None:
        """Take the end of a prefill, with the first token. Return what the client gets of it.

        The prefill ends there because of its epoch's token limit; the request goes on, unless the client wants no
        more. A request that cannot be continued elsewhere must not begin at the prefill worker: its token is dropped,
        and the decode worker samples it from the same KV.
        """
        job = live.prefill.job
        assert job is not None, "only a prefill worker that was granted the request sends tokens of it"
        if delta.finish == "error":
            _log.warning(
                "request %s is left to its own worker, without a prefill worker: %s", live.request_id, delta.error
            )
            self._withdraw(job, "failed")
            return None
        if live.request.survival.fidelity is Fidelity.NONE:
            self._hand_over(job, self._sharing(job))
            return None
        goes_on = delta.finish == "length" and live.request.max_tokens != 1
        if goes_on:
            delta = msgspec.structs.replace(delta, finish=None)
        verdict, _ = live.log.accept(delta)
        if verdict is not Verdict.ACCEPTED:
            return None
        if delta.finish != "abort":
            self._hand_over(job, [other for other in self._sharing(job) if goes_on or other is not live])
        return delta

    def withdraw_overdue(self, now: float) -> None:
        """End the jobs that were not claimed, or not finished, in time."""
        known = [live.prefill.job for live in self._requests.values() if live.prefill.job is not None]
        for job in {job.id: job for job in known}.values():
            if now > job.deadline:
                self._withdraw(job, "not claimed in time" if job.granted is None else "not computed in time")

    def leave_job(self, live: LiveRequest) -> None:
        """Take the request, which has ended or lost its prefill worker, off its job. If the job was its own, the job
        ends, and the requests that share it are placed again."""
        job, live.prefill.job = live.prefill.job, None
        if job is None or job.request_id != live.request_id:
            return
        self._waits_no_more(job)
        for other in self._sharing(job):
            other.prefill.job = None
            self._tasks.spawn(f"place {other.request_id}", self._place(other, other.prefill.decode_worker))

    async def release(self, live: LiveRequest) -> None:
        """Free the prefill that is held for the request, unless others need it: the decode worker has the KV, or the
        request has ended."""
        held, live.prefill.held = live.prefill.held, None
        if held is not None and not self.is_held(held.request):
            await self._link.cancel(held.worker, held.request)

    def is_held(self, prefill: RequestEpoch) -> bool:
        """Return whether a live request needs the KV of this prefill."""
        held = (live.prefill.held for live in self._requests.values())
        return any(each is not None and each.request == prefill for each in held)

    # Claims

    async def _on_claim(self, claim: PrefillClaim) -> PrefillGrant:
        return PrefillGrant(self._grant(claim))

    def _grant(self, claim: PrefillClaim) -> Submit | None:
        job = self._job_of(claim)
        if job is None:
            self._outcomes["not wanted any more"] += 1
            return None
        job = self._whose_turn(job)
        live = self._requests[job.request_id]
        job.claims += 1
        if max(job.claims, claim.delivery) > self._deadlines.deliveries:
            self._withdraw(job, "delivered too often")
            return None
        if live.at_prefill_worker:
            # The job was delivered again, and the worker that claimed it first may still compute the prompt.
            self._take_back(live)
        job.granted = live.log.assign(claim.worker)
        job.deadline = time.monotonic() + self._deadlines.at_work_s
        return msgspec.structs.replace(self._placer.submission(live, job.granted, at_most=1), hold_s=HOLD_S)

    def _job_of(self, claim: PrefillClaim) -> Job | None:
        """Return what the job that is claimed stands for; None: nobody needs it any more."""
        job = self._by_id.get(claim.job)
        live = None if job is None else self._requests.get(job.request_id)
        return job if live is not None and live.prefill.job is job else None

    def _whose_turn(self, job: Job) -> Job:
        """Return whose turn it is when this job comes out of the queue. If it is another one's, that one takes its
        place, and it takes the place of the other one, which is still in the queue."""
        if self._jobs is None:
            return job
        turn = self._jobs.turns.take(job)
        turn.id, job.id = job.id, turn.id
        self._by_id[turn.id], self._by_id[job.id] = turn, job
        return turn

    def _waits_no_more(self, job: Job) -> None:
        if self._jobs is not None:
            self._jobs.turns.discard(job)

    def _take_back(self, live: LiveRequest) -> None:
        """Take the request from its prefill worker."""
        granted = live.log.current
        worker = live.log.give_up(granted.epoch)
        if worker is not None:
            self._tasks.spawn(f"take {granted} back", self._link.cancel(worker, granted))

    # Ways out

    def _unpublished(self, live: LiveRequest, job: Job) -> bool:
        """Withdraw a job that the queue has not confirmed. Return whether the request is to be given to its decode
        worker now: not if a prefill worker has claimed the job nevertheless, or if the job has ended otherwise."""
        if live.prefill.job is not job or job.granted is not None:
            return False
        live.prefill.job = None
        self._withdraw(job, "not queued")
        return True

    def _withdraw(self, job: Job, why: str) -> None:
        """End a job without a prefill: the decode workers compute the prompt."""
        self._outcomes[why] += 1
        self._waits_no_more(job)
        for live in self._sharing(job):
            if live.at_prefill_worker:
                self._take_back(live)
            live.prefill.job = None
            live.prefill.jobs = self._deadlines.jobs
            place = self._place(live, live.prefill.decode_worker)
            self._tasks.spawn(f"prefill {live.request_id} at its decode worker", place)

    def _hand_over(self, job: Job, sharing: list[LiveRequest]) -> None:
        """Give these requests to their decode workers, which pull the KV that the prefill worker has computed."""
        self._outcomes["prefilled elsewhere"] += 1
        owner = self._requests[job.request_id]
        owner.prefill.job = None
        if not sharing:
            return
        prefill = owner.log.current
        source = owner.log.give_up(prefill.epoch)
        assert source is not None, "only tokens of the current epoch end a prefill"
        for live in sharing:
            live.prefill.job = None
            live.prefill.held = Held(source, prefill)
            place = self._place(live, live.prefill.decode_worker)
            self._tasks.spawn(f"hand over {live.request_id}", place)

    def _job_for(self, request: Request) -> Job | None:
        """Return a job in progress for the same prompt, unless the request is more urgent than the job."""
        same = (
            live.prefill.job
            for live in self._requests.values()
            if live.prefill.job is not None
            and live.prefill.job.priority <= request.priority
            and live.request.cache_salt == request.cache_salt
            and live.request.adapter == request.adapter
            and live.request.prompt_token_ids == request.prompt_token_ids
        )
        return next(same, None)

    def _sharing(self, job: Job) -> list[LiveRequest]:
        return [live for live in self._requests.values() if live.prefill.job is job]
