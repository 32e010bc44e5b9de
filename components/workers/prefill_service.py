"""A prefill worker's duty: take jobs from the queue, claim their requests, prefill, keep the KV until it is fetched.

A job stays in the queue's books until the decode worker has taken over: should this process die before that, the
queue delivers it to another one. Whether anybody still wants it, only its frontend knows, who is asked each time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from components.workers.engine_service import EngineService
from components.workers.requests.epoch_events import EpochListener
from dynamo_local.bus.prefill_consumer import PrefillConsumer, TakenJob
from dynamo_local.bus.prefill_queue import KEEP_ALIVE_S
from dynamo_local.core.errors import BusError, DecodeError, QueueAbsentError
from dynamo_local.core.messages.prefill import PrefillClaim, PrefillGrant
from dynamo_local.log_once import LogOnce
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

_TAKE_S = 1.0
_CLAIM_S = 3.0


class PrefillService:
    """Takes prefill jobs while it is on. `batch` jobs are computed at once."""

    def __init__(self, context: ServiceContext, duty: EngineService, batch: int) -> None:
        self._context = context
        self._duty = duty
        self._batch = batch
        self._taker = PrefillConsumer(context.bus, context.subjects)
        self._taking: asyncio.Task[None] | None = None
        self._at_work = 0
        """Jobs that are claimed or computed."""
        self._claiming = 0
        """Jobs of which it is not clear yet whether they are to be done."""
        self._fewer = asyncio.Event()

    @property
    def is_on(self) -> bool:
        return self._taking is not None

    def start(self) -> None:
        """Take jobs from now on."""
        if self._taking is None:
            self._taking = self._context.tasks.spawn("prefill jobs", self._take_jobs())

    async def stop(self) -> None:
        """Take no more jobs. Those in hand are finished, and their KV kept, as ever: when this returns, the engine has
        them all."""
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
            await self._taker.close()
        while self._claiming:
            self._fewer.clear()
            await self._fewer.wait()

    async def _take_jobs(self) -> None:
        trouble = LogOnce(_log)
        while True:
            if (room := self._batch - self._at_work) <= 0:
                self._fewer.clear()
                await self._fewer.wait()
                continue
            try:
                jobs = await self._taker.take(room, _TAKE_S)
            except QueueAbsentError as error:
                trouble.note(f"no prefill jobs: {error}")
                continue
            trouble.over()
            for job in jobs:
                # Counted here: the task begins later.
                self._at_work += 1
                self._claiming += 1
                self._context.tasks.spawn(f"prefill {job.job.request_id}", self._work(job))

    async def _work(self, job: TakenJob) -> None:
        try:
            watch = await self._claim(job)
            if watch is None:
                return
            await self._keep_until(watch.computed, job)
        finally:
            self._at_work -= 1
            self._fewer.set()
        await self._keep_until(watch.forgotten, job)
        await job.done()

    async def _claim(self, job: TakenJob) -> EpochListener | None:
        try:
            return await self._begin(job)
        finally:
            self._claiming -= 1
            self._fewer.set()

    async def _begin(self, job: TakenJob) -> EpochListener | None:
        """Put the job's request to the engine, if its frontend still wants that."""
        if time.monotonic() > job.job.deadline:
            await job.end("its deadline has passed")
            return None
        claim = PrefillClaim(job.job.job, job.job.request_id, self._context.lease, job.delivery)
        subject = self._context.subjects.claims(job.job.frontend)
        try:
            work = (await self._context.bus.ask(subject, claim, PrefillGrant, timeout_s=_CLAIM_S)).work
        except (BusError, DecodeError) as error:
            # It comes again when its time is up, and ends with its deadline if the frontend is gone for good. (Given
            # back at once, it would be here again at once.)
            _log.warning("%s cannot be claimed: %s", job.job.request_id, error)
            return None
        if work is None:
            await job.end("its frontend does not want it any more")
            return None
        return await self._duty.take(work)

    async def _keep_until(self, event: asyncio.Event, job: TakenJob) -> None:
        while not event.is_set():
            try:
                await asyncio.wait_for(event.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                await job.keep_alive()
