"""Answers operators: lists the live requests of a frontend, and carries out orders to migrate some of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

import msgspec

from components.frontend.migration.scheduler import MigrationScheduler
from components.frontend.requests import LiveRequest
from dynamo_local.bus.nats import Bus, Message
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.admin import (
    AdminRequest,
    MigrationOrder,
    MigrationReport,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.names import Subjects
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

    async def start(self) -> None:
        """Begin to answer."""
        await self._bus.subscribe(self._subject, self._on_question)

    async def _on_question(self, message: Message) -> None:
        try:
            question: AdminRequest = codec.decode(message.data, AdminRequest)
        except DecodeError as error:
            _log.warning("question of an operator ignored: %s", error)
            return
        match question:
            case RequestsQuestion():
                await self._answer(message.reply, self._rows(question.limit))
            case MigrationOrder():
                # Not awaited: a migration takes a while, and other questions come meanwhile.
                self._tasks.spawn("ordered migrations", self._migrate(question, message.reply))

    def _rows(self, limit: int) -> RequestsAnswer:
        now = time.monotonic()
        most = max(min(limit, MOST_ROWS), 0)
        rows = tuple(self._row(live, now) for live in itertools.islice(self._requests.values(), most))
        return RequestsAnswer(rows, len(self._requests) - len(rows))

    def _row(self, live: LiveRequest, now: float) -> RequestRow:
        current = live.migration.current
        return RequestRow(
            live.request_id,
            live.log.epoch,
            live.log.worker,
            len(live.request.prompt_token_ids),
            live.log.position,
            now - live.born_at,
            None if current is None else current.destination,
            self._scheduler.why_not(live),
        )

    async def _migrate(self, order: MigrationOrder, reply: str) -> None:
        wanted = frozenset(order.request_ids)
        chosen = [
            live
            for live in self._requests.values()
            if live.request_id in wanted or (order.source is not None and live.log.worker == order.source)
        ]
        orders = [self._scheduler.order(live, order.destination, cold=order.cold) for live in chosen]
        results = await asyncio.gather(*orders)
        await self._answer(reply, MigrationReport(tuple(results)))

    async def _answer(self, reply: str, answer: msgspec.Struct) -> None:
        try:
            await self._bus.publish(reply, codec.encode(answer))
        except BusError as error:
            _log.warning("an operator's question could not be answered: %s", error)
