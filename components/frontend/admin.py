"""Answers operators: which requests this frontend has, and having some of them moved."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping

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
"""Requests told at once: a quarter of what the bus takes in one message."""


class FrontendAdmin:
    """Of one frontend. `live` are the dispatcher's requests."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        live: Mapping[str, LiveRequest],
        mover: MigrationScheduler,
        tasks: TaskGuard,
    ) -> None:
        self._bus = bus
        self._subject = subjects.requests(lease)
        self._live = live
        self._mover = mover
        self._tasks = tasks

    async def start(self) -> None:
        """Answer from now on."""
        await self._bus.subscribe(self._subject, self._on_inquiry)

    async def _on_inquiry(self, message: Message) -> None:
        try:
            inquiry: AdminRequest = codec.decode(message.data, AdminRequest)
        except DecodeError as error:
            _log.warning("inquiry ignored: %s", error)
            return
        match inquiry:
            case RequestsQuestion():
                await self._answer(message.reply, self._rows(inquiry.limit))
            case MigrationOrder():
                # Not awaited: a move takes a while, and others ask.
                self._tasks.spawn("moves by hand", self._move(inquiry, message.reply))

    def _rows(self, limit: int) -> RequestsAnswer:
        now = time.monotonic()
        told = max(min(limit, MOST_ROWS), 0)
        rows = tuple(self._row(live, now) for live in itertools.islice(self._live.values(), told))
        return RequestsAnswer(rows, len(self._live) - len(rows))

    def _row(self, live: LiveRequest, now: float) -> RequestRow:
        return RequestRow(
            live.request_id,
            live.log.epoch,
            live.log.worker,
            len(live.request.prompt_token_ids),
            live.log.position,
            now - live.born_at,
            live.moving.destination if live.moving is not None else None,
            self._mover.why_not(live),
        )

    async def _move(self, order: MigrationOrder, reply: str) -> None:
        wanted = frozenset(order.request_ids)
        meant = [
            live
            for live in self._live.values()
            if live.request_id in wanted or (order.source is not None and live.log.worker == order.source)
        ]
        orders = [self._mover.order(live, order.destination, cold=order.cold) for live in meant]
        results = await asyncio.gather(*orders)
        await self._answer(reply, MigrationReport(tuple(results)))

    async def _answer(self, reply: str, answer: msgspec.Struct) -> None:
        try:
            await self._bus.publish(reply, codec.encode(answer))
        except BusError as error:
            _log.warning("an operator is not answered: %s", error)
