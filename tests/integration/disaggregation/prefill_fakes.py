"""A frontend that has long prompts prefilled elsewhere, on a real queue, and workers that do what a test tells them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from components.frontend.prefill import PrefillDeadlines, PrefillJobs
from dynamo_local.bus.jetstream.prefill_queue import LIMITS, PrefillConsumer, PrefillQueue, TakenJob
from dynamo_local.bus.nats import Bus
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.work import PrefillClaim, PrefillGrant, QueueLength, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.disaggregation import PrefillLimits
from dynamo_local.core.request.recovery import Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, FakeWorker, request, until

LONG = tuple(range(20))
WORTH_IT = PrefillLimits(max_local_prefill_length=4, max_prefill_queue_size=3)
HASTY_QUEUE = replace(LIMITS, ack_wait_s=1.0)
"""Delivers a job again soon if nobody keeps it alive."""
_W = TypeVar("_W", bound=FakeWorker)

ENDLESS = PrefillDeadlines(in_queue_s=3600.0)
"""Of a frontend that waits for prefill workers as long as a test may take."""


def long_request(request_id: str = "r1", **more: Any) -> Request:
    """A request that is worth being prefilled elsewhere, and survives that."""
    return request(request_id, **{"prompt": LONG, "survival": Survival(), "max_tokens": 8, **more})


class FakePrefillWorker(FakeWorker):
    """Takes jobs, claims their requests and answers, one by one."""

    def __init__(self, bus: Bus, subjects: Subjects, lease: str) -> None:
        super().__init__(bus, subjects, lease, role=PREFILL_ROLE)
        self.consumer = PrefillConsumer(bus, subjects)

    async def job(self) -> TakenJob:
        """The next one from the queue."""
        (job,) = await self.consumer.take(1, DEADLINE_S)
        return job

    async def claim(self, job: TakenJob, delivery: int | None = None) -> Submit | None:
        told = job.delivery if delivery is None else delivery
        claim = PrefillClaim(job.job.job, job.job.request_id, self.lease, told)
        subject = self._subjects.claims(job.job.frontend)
        return (await self._bus.ask(subject, claim, PrefillGrant, timeout_s=DEADLINE_S)).work

    async def granted(self) -> tuple[TakenJob, Submit]:
        """The next job, and the request that it is for."""
        job = await self.job()
        work = await self.claim(job)
        assert work is not None
        return job, work

    async def finish(self, work: Submit, token: int = 50) -> None:
        """Send the first token, with which a prefill ends."""
        await self.send(work, work.position, token, finish="length")

    async def is_not_told_to_stop(self, frontend: str) -> None:
        """To all that this worker has sent, the frontend has nothing to say."""
        await self.send_all(frontend, TokenDelta("nobody's", 1, 0, [1]))
        assert await self.cancelled() == RequestEpoch("nobody's", 1)


@dataclass
class Disaggregated:
    """A frontend, its queue, and workers of either kind that it knows."""

    frontend: FakeFrontend
    queue: PrefillQueue
    bus: Bus
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        assert self.frontend.remote is not None
        return self.frontend.remote.outcomes

    async def decode_worker(self, lease: str) -> FakeWorker:
        """One more, which the frontend knows."""
        return await self._start(FakeWorker(self.bus, self.frontend.subjects, lease))

    async def prefill_worker(self, lease: str) -> FakePrefillWorker:
        """One more, which the frontend knows."""
        return await self._start(FakePrefillWorker(self.bus, self.frontend.subjects, lease))

    async def _start(self, worker: _W) -> _W:
        self.workers.append(await worker.start())
        await until(lambda: self.frontend.fleet.view.get(worker.lease) is not None)
        return worker

    async def vanishes(self, worker: FakeWorker) -> None:
        """The worker is gone, and the frontend has noticed."""
        await worker.vanish()
        await until(lambda: self.frontend.fleet.view.get(worker.lease) is None)

    async def submit(self, request: Request | None = None) -> None:
        await self.frontend.dispatcher.submit(request or long_request())

    async def output(self) -> TokenDelta:
        return await self.frontend.output()

    async def queued(self, jobs: int) -> None:
        """So many jobs wait in the queue."""
        await self._length(QueueLength(waiting=jobs, in_hand=0))

    async def is_over(self) -> None:
        """Nothing is left of any request: neither here nor in the ledger nor in the queue."""
        ledger = self.frontend.local.ledger
        await until(lambda: self.frontend.dispatcher.live_requests == 0)
        await until(lambda: all(ledger.outstanding(worker.lease) == 0 for worker in self.workers))
        await self._length(QueueLength(0, 0))

    async def _length(self, length: QueueLength) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.queue.length() != length:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.frontend.close()
        for worker in self.workers:
            if isinstance(worker, FakePrefillWorker):
                await worker.consumer.close()


def remote_prefill(
    deadlines: PrefillDeadlines = ENDLESS, limits: PrefillLimits = WORTH_IT
) -> Callable[..., PrefillJobs]:
    """For `FakeFrontend.remote_of`."""

    def make(frontend: FakeFrontend) -> PrefillJobs:
        return PrefillJobs(frontend.bus, frontend.subjects, frontend.lease, frontend.fleet, lambda: limits, deadlines)

    return make
