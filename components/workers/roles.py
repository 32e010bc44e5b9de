"""What the server orders of a worker: another role while it runs, and to park and to wake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from components.workers.parking import Parking, WhyNot
from components.workers.prefill_service import PrefillService
from dynamo_local.core.errors import EngineError
from dynamo_local.core.fleet.view import DECODE_ROLE, PREFILL_ROLE
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion, RoleAnswer, RoleQuestion
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)


class Roles:
    """Makes a worker act in the role that it announces. A change touches neither engine nor connections nor requests:

    leaving "prefill", the worker takes no more jobs, and keeps finished prefills until they are fetched;
    leaving "decode", the router assigns it no more requests, and frontends migrate those that can be; the worker
    finishes the others.
    """

    def __init__(
        self, context: ServiceContext, prefill: PrefillService, is_parked: Callable[[], bool] = lambda: False
    ) -> None:
        self._context = context
        self._prefill = prefill
        self._is_parked = is_parked
        self._changing = asyncio.Lock()
        self._ended = False

    @property
    def role(self) -> str:
        return self._context.announcer.presence.role

    @property
    def is_changing(self) -> bool:
        return self._changing.locked()

    async def start(self) -> None:
        """Act in the role that this process was started in. Raises EngineError if its engine cannot."""
        if self.role == PREFILL_ROLE:
            if (why := self._no_transfer()) is not None:
                remedy = "mend that, or serve a graph without prefill workers"
                raise EngineError(f"nobody could read what this worker prefills: {why}", remedy)
            self._prefill.start()
        await self._context.bus.serve(self._context.subjects.role(self._context.lease), RoleQuestion, self._on_question)

    async def stop(self) -> None:
        """Take no more jobs, and refuse further changes of the role: the worker ends."""
        async with self._changing:
            self._ended = True
            await self._prefill.stop()

    async def take_up(self, role: str) -> RoleAnswer:
        """Change the role; the answer says why not where this is not possible."""
        async with self._changing:
            if role == self.role:
                return RoleAnswer(role)
            if (why := self._why_not(role)) is not None:
                return RoleAnswer(self.role, refused=why)
            self._context.announcer.update(role=role)
            # Before the answer, so that the server, which writes the role down, has heard of it by then.
            await self._context.announcer.announce()
            if role == PREFILL_ROLE:
                self._prefill.start()
            else:
                await self._prefill.stop()
            _log.info("the role is %s now", role)
            return RoleAnswer(role)

    def _why_not(self, role: str) -> str | None:
        if self._is_parked():
            return "the worker is parked"
        if not any(service.role == PREFILL_ROLE for service in self._context.graph.services):
            return "the graph has no prefill workers, and so no prefill queue"
        if role not in (PREFILL_ROLE, DECODE_ROLE):
            return f"there is no role {role!r}; there are {PREFILL_ROLE} and {DECODE_ROLE}"
        if self._ended:
            return "the worker is ending"
        if role == PREFILL_ROLE and (why := self._no_transfer()) is not None:
            return f"no worker could pull the KV that this one prefills: {why}"
        return None

    def _no_transfer(self) -> str | None:
        engine = self._context.announcer.presence.engine
        return None if engine is None else engine.no_transfer

    async def _on_question(self, question: RoleQuestion) -> RoleAnswer:
        return await self.take_up(question.role)


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
        # In tasks: an order to wake is not to wait for the reading of a later message.
        subject = context.subjects.parking(context.lease)
        await context.bus.serve(subject, ParkQuestion, self._on_question, tasks=context.tasks)

    def stop(self) -> None:
        """Refuse to park from now on: the worker ends."""
        self._ended = True

    async def _on_question(self, question: ParkQuestion) -> ParkAnswer:
        # An engine that does not wake ends the worker.
        answer: ParkAnswer = await self._context.tasks.spawn("park or wake", self._obey(question))
        return answer

    async def _obey(self, question: ParkQuestion) -> ParkAnswer:
        refused: str | None = None
        if question.parked:
            async with self._ordered:
                refused = await self._park()
        else:
            await self._parking.wake()
        return ParkAnswer(self._parking.resting, refused)

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
