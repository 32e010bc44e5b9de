"""Migrates requests of a frontend off workers that run full, to free ones; core/migration/rebalancing.py decides which.

Each frontend looks after its own requests. Several of them cannot pour into the same worker: a destination takes a
request only if it stays free enough with all that it has been promised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from components.frontend.migration.scheduler import MigrationScheduler
from components.frontend.requests import LiveRequest
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.migration.rebalancing import Candidate, PlannedMigration, RebalancingLimits, plan, room_of
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = BEAT_S
"""As often as workers tell their load."""

_SILENT_S = 2.0
"""A request that has brought no token for so long waits, or its worker hangs: it has no KV that could be pulled."""


class Rebalancer:
    """Of one frontend. `limits`, as they are now; None: nothing is to be moved."""

    def __init__(
        self,
        mover: MigrationScheduler,
        fleet: FleetWatch,
        limits: Callable[[], RebalancingLimits | None],
        tasks: TaskGuard,
    ) -> None:
        self._mover = mover
        self._fleet = fleet
        self._limits = limits
        self._tasks = tasks

    def start(self) -> None:
        """Look now and then from now on."""
        self._tasks.spawn("rebalancing", self._run())

    async def _run(self) -> None:
        while True:
            await self._mover.live.pause(_LOOK_EVERY_S)
            limits = self._limits()
            if limits is not None and not self._mover.stopped:
                self._look(limits, time.monotonic())

    def _look(self, limits: RebalancingLimits, now: float) -> None:
        workers = {worker.lease: worker for worker in self._fleet.view.routable()}
        known = [room_of(worker, now, self._mover.traffic.change(worker)) for worker in workers.values()]
        rooms = [room for room in known if room is not None]
        if len(rooms) < 2:
            return
        candidates = [
            Candidate(live.request_id, live.log.worker, live.tokens, live.request.priority)
            for live in self._mover.live.values()
            if live.log.worker is not None and self._may_move(live, limits, now)
        ]
        for transfer in plan(rooms, candidates, limits):
            self._begin(transfer, workers[transfer.destination])

    def _may_move(self, live: LiveRequest, limits: RebalancingLimits, now: float) -> bool:
        last = live.pace.last
        rested = live.moved_at is None or now - live.moved_at >= limits.period_s
        running = last is not None and now - last < _SILENT_S
        return rested and running and now >= live.not_before and self._mover.why_not(live) is None

    def _begin(self, transfer: PlannedMigration, destination: Presence) -> None:
        live = self._mover.live[transfer.request_id]
        if self._mover.has_turn(live):
            _log.info(
                "request %s is to move from %s to %s (%s)",
                transfer.request_id,
                transfer.source,
                destination.watcher,
                transfer.reason,
            )
            self._mover.begin(live, destination, transfer.reason, floor=transfer.floor)
