"""Carries out the server's orders to a worker to park and to wake."""

from __future__ import annotations

import asyncio

from components.workers.parking import Parking, WhyNot
from components.workers.prefill_service import PrefillService
from components.workers.roles import Roles
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.process.context import ServiceContext


class ParkingOrders:
    """Carries out the server's orders to park and to wake. `why_busy`: why the engine's service cannot pause."""

    def __init__(
        self, context: ServiceContext, parking: Parking, why_busy: WhyNot, roles: Roles, prefill: PrefillService
    ) -> None:
        self._context = context
        self._parking = parking
        self._why_busy = why_busy
        self._roles = roles
        self._prefill = prefill
        self._ordered = asyncio.Lock()
        self._ended = False

    async def start(self) -> None:
        """Begin to obey."""
        context = self._context
        self._parking.on_wake(self._prefill_again)
        await context.bus.serve(context.subjects.parking(context.lease), ParkQuestion, self._on_question)

    def stop(self) -> None:
        """Refuse to park from now on: the worker ends."""
        self._ended = True

    async def _on_question(self, question: ParkQuestion, answer: Answer) -> None:
        # Not awaited: an order to wake is not to wait for the reading of a later message.
        name = "park" if question.parked else "wake"
        self._context.tasks.spawn(name, self._obey(question, answer))

    async def _obey(self, question: ParkQuestion, answer: Answer) -> None:
        refused: str | None = None
        if question.parked:
            async with self._ordered:
                refused = await self._park()
        else:
            await self._parking.wake()
        await answer.send(ParkAnswer(self._parking.resting, refused))

    async def _park(self) -> str | None:
        if not self._parking.resting and (refused := self._why_not()) is not None:
            return refused
        if self._prefill.is_on:
            await self._prefill.stop()
        refused = await self._parking.park(self._why_not)
        if refused is not None:
            self._prefill_again()
        return refused

    def _why_not(self) -> str | None:
        if self._ended:
            return "the worker is ending"
        if self._roles.is_changing:
            return "its role is being changed"
        if self._prefill.is_busy:
            return "it works on prefill jobs"
        return self._why_busy()

    def _prefill_again(self) -> None:
        """Take prefill jobs again, in that role."""
        if self._context.announcer.presence.role == PREFILL_ROLE and not self._ended:
            self._prefill.start()
