"""Routing for one model: its workers, their load, and the choice among them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.routing import AssignRequest, Charges, Released
from dynamo_local.core.routing.choice import RoutingPolicy
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.load_policies import LeastOutstandingTokens
from dynamo_local.core.subjects import Subjects

UNDER_WAY_S = 3.0
"""A frontend's charges may not contain assignments younger than this: they had not reached it when it sent them."""

_HEARD_WITHIN_S = 0.5
"""Time for workers to answer when they are asked for their presences. A frontend waits longer for its answer."""


@dataclass
class ModelRouting:
    """Routing among the workers of an endpoint's revision, or of the graph itself."""

    bus: Bus
    subjects: Subjects
    policy: RoutingPolicy = field(default_factory=LeastOutstandingTokens)
    ledger: Ledger = field(default_factory=Ledger, init=False)
    _fleet: FleetWatch = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _empty_since: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._fleet = FleetWatch(self.bus, self.subjects)
        self._fleet.subscribe(self._on_change)

    async def start(self) -> None:
        """Listen to the presences of the model's processes. Raises BusError."""
        await self._fleet.start()

    async def run(self) -> None:
        """Expire silent processes until cancelled."""
        await self._fleet.run()

    async def stop(self) -> None:
        """Listen no more."""
        await self._fleet.stop()

    async def heard(self) -> None:
        """Wait until there is a worker to assign to, or until workers would have been heard."""
        give_up_at = time.monotonic() + _HEARD_WITHIN_S
        while not self._fleet.view.routable() and (left_s := give_up_at - time.monotonic()) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def assign(self, request: AssignRequest) -> str | None:
        """Choose a worker and charge it with the request. Returns its lease; None if no worker is routable."""
        choice = self.policy.choose(request, self._fleet.view.routable(), self.ledger, time.monotonic())
        if choice is None:
            return None
        self.ledger.charge(request.frontend, request.request_id, choice.worker, request.tokens, time.monotonic())
        return choice.worker

    def release(self, released: Released) -> None:
        """Charge the request to no worker."""
        self.ledger.release(released.frontend, released.request_id)

    def settle(self, message: Charges) -> None:
        """Take a frontend's own account for its charges."""
        # Charges of workers that are gone would never be released.
        charges = [charge for charge in message.charges if self._fleet.view.get(charge.worker) is not None]
        now = time.monotonic()
        self.ledger.settle(message.frontend, charges, now - UNDER_WAY_S, now)

    def empty_for_s(self) -> float:
        """For how long it has had no process, by the calls of this method."""
        now = time.monotonic()
        if self._fleet.view.members():
            self._empty_since = None
            return 0.0
        self._empty_since = self._empty_since or now
        return now - self._empty_since

    def _on_change(self, change: Change) -> None:
        self._changed.set()
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self.ledger.forget_worker(change.presence.lease)
            self.ledger.forget_frontend(change.presence.lease)
