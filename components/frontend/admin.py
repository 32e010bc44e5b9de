"""Answers operators: lists the live requests of a frontend, and carries out orders to migrate some of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from components.frontend.migration.scheduler import MigrationScheduler
from components.frontend.requests.live_requests import LiveRequest
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.admin import (
    AdminRequest,
    HeldRow,
    MigrationOrder,
    MigrationReport,
    RequestLine,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

MOST_ROWS = 2000
"""Requests listed at once: a quarter of what fits into one message on the bus."""


class FrontendAdmin:
    """Serves one frontend's subject for operators."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        scheduler: MigrationScheduler,
        tasks: TaskGuard,
    ) -> None:
        self._bus = bus
        self._subject = subjects.requests(lease)
        self._scheduler = scheduler
        self._requests = scheduler.requests
        self._tasks = tasks
        self.held: Callable[[], Sequence[HeldRow]] = tuple
        """Returns the requests that are held, the oldest first."""

    async def start(self) -> None:
        """Begin to answer."""
        # In tasks: a migration takes a while, and other questions come meanwhile.
        await self._bus.serve(self._subject, AdminRequest, self._on_question, tasks=self._tasks)

    async def _on_question(self, question: AdminRequest) -> RequestsAnswer | MigrationReport:
        if isinstance(question, RequestsQuestion):
            return self._rows(question.limit)
        return await self._migrate(question)

    def _rows(self, limit: int) -> RequestsAnswer:
        now = time.monotonic()
        most = max(min(limit, MOST_ROWS), 0)
        rows = tuple(self._row(live, now) for live in itertools.islice(self._requests.values(), most))
        held = self.held()
        left_out = len(self._requests) - len(rows) + max(0, len(held) - most)
        return RequestsAnswer(rows, left_out, tuple(held[:most]))

    def _row(self, live: LiveRequest, now: float) -> RequestLine:
        current, began = live.migration.current, live.recovery.epoch_began_at
        survival = live.request.survival
        return RequestLine(
            request=live.request_id,
            worker=live.log.worker,
            epoch=live.log.epoch,
            prompt_tokens=len(live.request.prompt_token_ids),
            tokens=live.log.position,
            age_s=now - live.born_at,
            moving_to=None if current is None else current.destination,
            stays=self._scheduler.why_not(live),
            epoch_age_s=None if began is None else now - began,
            epoch_start=live.recovery.epoch_start,
            migrations=live.migration.times,
            prefill=_prefill(live),
            fidelity=survival.fidelity.name.lower(),
            fidelity_because_of=survival.because_of,
        )

    async def _migrate(self, order: MigrationOrder) -> MigrationReport:
        wanted = frozenset(order.request_ids)
        chosen = [
            live
            for live in self._requests.values()
            if live.request_id in wanted or (order.source is not None and live.log.worker == order.source)
        ]
        orders = [self._scheduler.order(live, order.destination, cold=order.cold) for live in chosen]
        return MigrationReport(tuple(await asyncio.gather(*orders)))


def _prefill(live: LiveRequest) -> str | None:
    """Return how far the remote prefill of a request is, in words; None if its decode worker prefills."""
    if live.prefill.job is not None:
        return "a prefill worker computes the prompt" if live.prefill.job.granted else "its prefill job is queued"
    if live.prefill.held is not None:
        return "a prefill worker has the KV of the prompt"
    return "a prefill job has ended" if live.prefill.jobs else None
