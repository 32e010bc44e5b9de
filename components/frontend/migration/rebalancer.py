"""Migrates requests of a frontend off workers that run full, to free ones. core/migration/rebalancing.py decides which.

Each frontend looks after its own requests. Several frontends cannot overfill the same worker: a destination accepts a
request only if it stays free enough with all requests that it has accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from components.frontend.migration.scheduler import MigrationScheduler
from components.frontend.requests.live_requests import LiveRequest
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.migration.rebalancing import (
    Candidate,
    PlannedMigration,
    RebalancingLimits,
    ThrashWatch,
    WorkerRoom,
    plan,
    room_of,
)
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_CHECK_EVERY_S = BEAT_S
"""Workers report their load as often."""

_SILENT_S = 2.0
"""A request without a token for so long waits in a queue, or its worker hangs: its KV cannot be pulled."""


class Rebalancer:
    """Rebalances the requests of one frontend."""

    def __init__(
        self,
        scheduler: MigrationScheduler,
        fleet: FleetWatch,
        limits: Callable[[], RebalancingLimits | None],
        tasks: TaskGuard,
    ) -> None:
        """`limits` returns the limits that hold now; None: rebalancing is off."""
        self._scheduler = scheduler
        self._fleet = fleet
        self._limits = limits
        self._tasks = tasks
        self._thrash_watch = ThrashWatch()

    def start(self) -> None:
        """Rebalance periodically from now on."""
        self._tasks.spawn("rebalancing", self._run())

    async def _run(self) -> None:
        while True:
            await self._scheduler.requests.pause(_CHECK_EVERY_S)
            limits = self._limits()
            if limits is not None and not self._scheduler.stopped:
                self._rebalance(limits, time.monotonic())

    def _rebalance(self, limits: RebalancingLimits, now: float) -> None:
        workers = {worker.lease: worker for worker in self._fleet.view.routable()}
        rooms = self._rooms(workers.values(), now)
        if len(rooms) < 2:
            return
        candidates = [
            Candidate(live.request_id, live.log.worker, live.tokens, live.request.priority, live.log.position)
            for live in self._scheduler.requests.values()
            if live.log.worker is not None and self._may_migrate(live, limits, now)
        ]
        for planned in plan(rooms, candidates, limits):
            self._begin(planned, workers[planned.destination])

    def _rooms(self, workers: Collection[Presence], now: float) -> list[WorkerRoom]:
        """Return the room of the workers of which it is known."""
        thrashing = self._thrash_watch.look(workers, now)
        known = [room_of(worker, now, self._scheduler.in_flight.change(worker)) for worker in workers]
        return [replace(room, thrashing=room.lease in thrashing) for room in known if room is not None]

    def _may_migrate(self, live: LiveRequest, limits: RebalancingLimits, now: float) -> bool:
        last = live.pace.last
        migrated_at = live.migration.migrated_at
        rested = migrated_at is None or now - migrated_at >= limits.period_s
        running = last is not None and now - last < _SILENT_S
        return rested and running and now >= live.migration.not_before and self._scheduler.why_not(live) is None

    def _begin(self, planned: PlannedMigration, destination: Presence) -> None:
        live = self._scheduler.requests[planned.request_id]
        if self._scheduler.may_begin(live):
            _log.info(
                "request %s is to migrate from %s to %s (%s)",
                planned.request_id,
                planned.source,
                destination.watcher,
                planned.reason,
            )
            self._scheduler.begin(live, destination, planned.reason, floor=planned.floor)
