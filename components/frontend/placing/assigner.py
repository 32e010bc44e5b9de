"""Assigns a frontend's requests to workers: the router decides, or, in a graph without one, the same policy here."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Charge, Charged, Charges, Prefilled, Released
from dynamo_local.core.routing.choice import RoutingPolicy
from dynamo_local.core.routing.explanation import route_row
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.load_policies import LeastOutstandingTokens
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

_ROUTER_TIMEOUT_S = 1.0
_REPORT_CHARGES_EVERY_S = 5.0


class Assigner(Protocol):
    """Assigns requests to workers."""

    @property
    def needs_blocks(self) -> bool:
        """Whether questions are to say which blocks the requests' contexts have."""

    async def assign(self, request: AssignRequest) -> Assignment:
        """Choose the worker to take the request; none if no worker is routable."""

    async def prefilled(self, request_id: str) -> None:
        """Note that the request's first token has come. Never raises, like `release`."""

    async def release(self, request_id: str) -> None:
        """Charge the request to no worker. Never raises: at worst, a load is overestimated for a while."""

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        """Charge the request, with so many tokens of context, to this worker. Never raises, like `release`."""

    async def run(self) -> None:
        """Do what is to be done periodically, until cancelled."""


class LocalAssigner:
    """Applies a policy to this process's own view of the fleet and its own ledger."""

    def __init__(self, fleet: FleetWatch, frontend: str, policy: RoutingPolicy | None = None) -> None:
        self._fleet = fleet
        self._frontend = frontend
        self._policy = policy or LeastOutstandingTokens()
        self.ledger = Ledger()
        fleet.subscribe(self._on_change)

    @property
    def needs_blocks(self) -> bool:
        return self._policy.needs_blocks

    async def assign(self, request: AssignRequest) -> Assignment:
        choice = self._policy.choose(request, self._fleet.view.routable(), self.ledger, time.monotonic())
        if choice is None:
            return Assignment(None)
        self.ledger.charge(request.frontend, request.request_id, choice.worker, request.tokens, time.monotonic())
        assignment = Assignment(choice.worker)
        route = route_row(request, assignment, choice.costs) if request.explain else None
        return msgspec.structs.replace(assignment, route=route)

    async def prefilled(self, request_id: str) -> None:
        self.ledger.prefilled(self._frontend, request_id)

    async def release(self, request_id: str) -> None:
        self.ledger.release(self._frontend, request_id)

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        self.ledger.charge(self._frontend, request_id, worker, tokens, time.monotonic())

    async def run(self) -> None:
        return

    def knows(self, worker: str) -> bool:
        """Return whether the worker is in this frontend's view of the fleet."""
        return self._fleet.view.get(worker) is not None

    def _on_change(self, change: Change) -> None:
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self.ledger.forget_worker(change.presence.lease)


class RouterAssigner:
    """Asks the router. If the router does not answer (while it restarts), `fallback` decides, so that no request
    waits."""

    def __init__(self, bus: Bus, subjects: Subjects, frontend: str, fallback: LocalAssigner) -> None:
        self._bus = bus
        self._subjects = subjects
        self._frontend = frontend
        self._fallback = fallback
        self._router_up = True
        self._needs_blocks = True

    @property
    def needs_blocks(self) -> bool:
        return self._needs_blocks

    async def assign(self, request: AssignRequest) -> Assignment:
        try:
            assignment = await self._bus.ask(self._subjects.assign, request, Assignment, timeout_s=_ROUTER_TIMEOUT_S)
        except (BusError, DecodeError) as error:
            self._note_router(False, str(error))
            return await self._fallback.assign(request)
        self._note_router(True)
        self._needs_blocks = assignment.needs_blocks
        worker = assignment.worker
        if worker is None:
            return assignment
        if not self._fallback.knows(worker):
            # The router's view of the fleet is older than this one: it has just started, or has hung.
            return await self._fallback.assign(request)
        uncached = None if assignment.cached is None else max(request.tokens - assignment.cached, 0)
        charge = Charge(request.request_id, worker, request.tokens, uncached, order=assignment.order)
        self._fallback.ledger.take_over(self._frontend, charge, time.monotonic())
        if assignment.tell:
            await self._tell(Charged(self._frontend, charge, request.blocks))
        return assignment

    async def _tell(self, charged: Charged) -> None:
        """Tell all routers what one of them has assigned."""
        try:
            await self._bus.send(self._subjects.charged, charged)
        except BusError as error:
            _log.warning(
                "other routers were not told of an assignment (%s); the next report corrects their view", error
            )

    async def prefilled(self, request_id: str) -> None:
        await self._fallback.prefilled(request_id)
        try:
            await self._bus.send(self._subjects.prefilled, Prefilled(request_id=request_id, frontend=self._frontend))
        except BusError as error:
            _log.warning(
                "the router was not told that request %s has its first token (%s); the next report corrects its view",
                request_id,
                error,
            )

    async def release(self, request_id: str) -> None:
        await self._fallback.release(request_id)
        try:
            await self._bus.send(self._subjects.released, Released(request_id=request_id, frontend=self._frontend))
        except BusError as error:
            _log.warning(
                "the router was not told that request %s has left its worker (%s); the next report corrects its view",
                request_id,
                error,
            )

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        await self._fallback.reassign(request_id, worker, tokens)
        await self._report_charges()

    async def run(self) -> None:
        """Report all charges to the router from time to time: it may have missed messages, or have restarted."""
        while True:
            await asyncio.sleep(_REPORT_CHARGES_EVERY_S)
            await self._report_charges()

    async def _report_charges(self) -> None:
        charges = Charges(self._frontend, self._fallback.ledger.of_frontend(self._frontend, time.monotonic()))
        try:
            await self._bus.send(self._subjects.charges, charges)
        except BusError as error:
            _log.warning("the router was not told which requests run where; the next report follows soon: %s", error)

    def _note_router(self, up: bool, why: str = "") -> None:
        if up != self._router_up:
            self._router_up = up
            _log.warning("the router answers again" if up else f"assigning without the router: {why}")
