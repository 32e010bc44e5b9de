"""Works on prefill jobs: takes them from the queue, claims their requests, prefills, and keeps the KV to be fetched.

A job stays in the queue until the decode worker has taken over. If this process dies before that, the queue delivers
the job to another worker. Only the frontend knows whether the request still needs its prefill; it is asked for each
job, by a claim.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from components.workers.engine_service import EngineService
from components.workers.requests.counters import EpochListener
from dynamo_local.bus.jetstream.prefill_queue import ACK_WAIT_S, KEEP_ALIVE_S, PrefillConsumer, TakenJob
from dynamo_local.core.errors import BusDownError, BusError, DecodeError, NobodyListensError, QueueAbsentError
from dynamo_local.core.messages.work import PrefillClaim, PrefillGrant
from dynamo_local.log_once import LogOnce
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

_TAKE_S = 15.0
"""How long one attempt to take jobs waits for some."""
CLAIM_S = 3.0
"""Deadline of a frontend's answer to a claim."""
_SILENT_S = ACK_WAIT_S
"""For so long a frontend that is silent is asked for no other job. Otherwise each job of one that hangs would keep a
place here for `CLAIM_S`."""
_SILENT_CLAIMS = 2
"""Number of claims in a row without an answer that make a frontend silent. One may be slow: its jobs would be late."""


class PrefillService:
    """Takes prefill jobs from `start` to `stop`. `batch` jobs at most are claimed or computed at once."""

    def __init__(
        self, context: ServiceContext, engine_service: EngineService, batch: int, claim_s: float = CLAIM_S
    ) -> None:
        self._context = context
        self._engine_service = engine_service
        self._batch = batch
        self._claim_s = claim_s
        self._unanswered: dict[str, int] = {}
        """Number of claims in a row that a frontend has not answered, by lease."""
        self._silent_until: dict[str, float] = {}
        """When frontends that are silent are asked again (CLOCK_MONOTONIC, s), by lease."""
        self._consumer = PrefillConsumer(context.bus, context.subjects)
        self._taking: asyncio.Task[None] | None = None
        self._in_progress = 0
        """Jobs that are being claimed or computed."""
        self._claiming = 0
        """Jobs whose claim has not been answered."""
        self._less_work = asyncio.Event()
        """Set when one of these two numbers has become less."""

    @property
    def is_on(self) -> bool:
        return self._taking is not None

    @property
    def is_busy(self) -> bool:
        """Whether jobs are being claimed or computed."""
        return self._in_progress > 0

    def start(self) -> None:
        """Begin to take jobs."""
        if self._taking is None:
            self._taking = self._context.tasks.spawn("prefill jobs", self._take_jobs())

    async def stop(self) -> None:
        """Take no more jobs. Returns when the engine has all that were claimed; they are finished, and their KV kept
        until it is fetched."""
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
            await self._consumer.close()
        while self._claiming:
            self._less_work.clear()
            await self._less_work.wait()

    async def _take_jobs(self) -> None:
        log_once = LogOnce(_log)
        # nats-py ignores a cancellation that comes while it flushes: the next turn ends then.
        while self.is_on:
            if (room := self._batch - self._in_progress) <= 0:
                self._less_work.clear()
                await self._less_work.wait()
                continue
            try:
                jobs = await self._consumer.take(room, _TAKE_S)
            except QueueAbsentError as error:
                log_once.warn(f"no prefill jobs: {error}")
                continue
            log_once.clear()
            for job in jobs:
                # Counted before the task begins, or the next turn of this loop would take too many jobs.
                self._in_progress += 1
                self._claiming += 1
                self._context.tasks.spawn(f"prefill {job.job.request_id}", self._work(job))

    async def _work(self, job: TakenJob) -> None:
        try:
            events = await self._claim(job)
            if events is None:
                return
            await self._keep_until(events.computed, job)
        finally:
            self._in_progress -= 1
            self._less_work.set()
        await self._keep_until(events.forgotten, job)
        await job.done()

    async def _claim(self, job: TakenJob) -> EpochListener | None:
        try:
            return await self._begin(job)
        finally:
            self._claiming -= 1
            self._less_work.set()

    async def _begin(self, job: TakenJob) -> EpochListener | None:
        """Submit the job's request to the engine, if its frontend grants the claim."""
        frontend = job.job.frontend
        if time.monotonic() < self._silent_until.get(frontend, 0.0):
            await self._leave(job)
            return None
        claim = PrefillClaim(job.job.job, job.job.request_id, self._context.lease, job.delivery)
        subject = self._context.subjects.claims(frontend)
        try:
            work = (await self._context.bus.ask(subject, claim, PrefillGrant, timeout_s=self._claim_s)).work
        except (BusError, DecodeError) as error:
            _log.warning("the prefill of request %s cannot be claimed: %s", job.job.request_id, error)
            if isinstance(error, (DecodeError, NobodyListensError)):
                self._unanswered.pop(frontend, None)
            elif not isinstance(error, BusDownError):
                self._note_unanswered(frontend)
            await self._leave(job)
            return None
        self._unanswered.pop(frontend, None)
        if work is None:
            await job.end("its frontend does not need it any more")
            return None
        return await self._engine_service.take(work)

    async def _leave(self, job: TakenJob) -> None:
        """Let the queue deliver the job again, after ACK_WAIT_S, unless it is void. Given back, it would be delivered
        again at once."""
        if job.least_age_s >= job.job.valid_s:
            await job.end("nobody answers for it, and it is void")

    def _note_unanswered(self, frontend: str) -> None:
        self._unanswered[frontend] = self._unanswered.get(frontend, 0) + 1
        if self._unanswered[frontend] < _SILENT_CLAIMS:
            return
        now = time.monotonic()
        self._silent_until = {each: until for each, until in self._silent_until.items() if until > now}
        self._silent_until[frontend] = now + _SILENT_S

    async def _keep_until(self, event: asyncio.Event, job: TakenJob) -> None:
        while not event.is_set():
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await event.wait()
            except TimeoutError:
                await job.keep_alive()
