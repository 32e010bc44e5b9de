"""The router service: assigns requests to workers by a routing policy (core/fleet/routing.py)."""

from __future__ import annotations

import time

from components.workers import VllmWorker
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.fleet.routing import LeastOutstandingTokens, Ledger, RoutingPolicy
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Charges, Released
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import Service, async_on_start, depends, service

UNDER_WAY_S = 3.0
"""A frontend's charges may not contain assignments younger than this: they had not reached it when it sent them."""


@service(role="router")
class Router(Service):
    """Assigns requests to workers, and counts them as their load until they are released."""

    workers = depends(VllmWorker)

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._fleet = FleetWatch(context.bus, context.subjects)
        self._ledger = Ledger()
        self._policy: RoutingPolicy = LeastOutstandingTokens()
        self._assigned = self._unassigned = 0

    @async_on_start
    async def start(self) -> None:
        """Listen. A restarted router starts with an empty ledger, and learns the load from the charges of frontends."""
        subjects = self._context.subjects
        self._context.announcer.note(counts=Counts(assigned=0, unassigned=0))
        self._fleet.subscribe(self._on_change)
        await self._fleet.start()
        self._context.tasks.spawn("fleet", self._fleet.run())
        bus = self._context.bus
        await bus.serve(subjects.assign, AssignRequest, self._on_assign, queue="router")
        await bus.listen(subjects.released, Released, self._on_released)
        await bus.listen(subjects.charges, Charges, self._on_charges)

    async def _on_assign(self, request: AssignRequest, answer: Answer) -> None:
        worker = self._policy.choose(request, self._fleet.view.routable(), self._ledger)
        if worker is not None:
            self._ledger.charge(request.frontend, request.request_id, worker, request.tokens, time.monotonic())
        self._count(found=worker is not None)
        await answer.send(Assignment(worker=worker))

    def _count(self, *, found: bool) -> None:
        self._assigned += found
        self._unassigned += not found
        self._context.announcer.note(counts=Counts(assigned=self._assigned, unassigned=self._unassigned))

    async def _on_released(self, released: Released) -> None:
        self._ledger.release(released.frontend, released.request_id)

    async def _on_charges(self, message: Charges) -> None:
        # Charges of workers that are gone would never be released.
        charges = [charge for charge in message.charges if self._fleet.view.get(charge.worker) is not None]
        now = time.monotonic()
        self._ledger.settle(message.frontend, charges, now - UNDER_WAY_S, now)

    def _on_change(self, change: Change) -> None:
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self._ledger.forget_worker(change.presence.lease)
            self._ledger.forget_frontend(change.presence.lease)
