"""Follows a running graph, or a revision of an endpoint, over the bus: presences, the planner's reports, and the length
of the prefill queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, QueueAbsentError
from dynamo_local.core.fleet.view import FRONTEND_ROLE, Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.metrics import Snapshot

_log = logging.getLogger(__name__)

QUEUE_EVERY_S = 1.0
REPORT_TTL_S = 10.0
"""Age, in seconds, beyond which the planner's last report is dropped: the planner has ended."""


class GraphWatch:
    """Keeps the state of a graph, or of the subjects' revision, for snapshots. `fleet` is started and run by its owner.

    A revision has workers and a queue. What works for all models belongs to the graph: the planner, and frontends,
    though they announce themselves in each revision.
    """

    def __init__(
        self, bus: Bus, subjects: Subjects, fleet: FleetWatch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet
        self._clock = clock
        self._queue = PrefillQueue(bus, subjects)
        self._length: QueueLength | None = None
        self._report: tuple[float, PlannerReport] | None = None
        self._counted: dict[float, int] = {}
        """Decisions counted so far, by the time of the first of each report."""
        self._starts: Counter[str] = Counter()
        self._decisions: Counter[bool] = Counter()

    async def start(self) -> None:
        """Subscribe. Call before the fleet is started, so that no start of a process is missed."""
        self._fleet.subscribe(self._on_change)
        if not self._subjects.revision:
            await self._bus.listen(self._subjects.planner, PlannerReport, self._on_report)

    async def follow_queue(self) -> None:
        """Read the length of the prefill queue every `QUEUE_EVERY_S` until cancelled; return if the graph has none."""
        while True:
            try:
                self._length = await self._queue.length()
            except QueueAbsentError:
                self._length = None
                return
            except BusError as error:
                self._length = None
                _log.info("the length of the prefill queue is unknown: %s", error)
            await asyncio.sleep(QUEUE_EVERY_S)

    def snapshot(self) -> Snapshot:
        """Return the graph as it is known now."""
        now = self._clock()
        view = self._fleet.view
        members = tuple(filter(self._is_member, view.members()))
        return Snapshot(
            at=now,
            members=members,
            routable=frozenset(presence.lease for presence in view.ready({member.role for member in members})),
            starts=self._starts.copy(),
            queue=self._length,
            planner=self._last_report(now),
            decisions=self._decisions.copy(),
        )

    def _last_report(self, now: float) -> PlannerReport | None:
        if self._report is None or now - self._report[0] > REPORT_TTL_S:
            return None
        return self._report[1]

    def _is_member(self, presence: Presence) -> bool:
        return not self._subjects.revision or presence.role != FRONTEND_ROLE

    def _on_change(self, change: Change) -> None:
        if change.what is Happened.APPEARED and self._is_member(change.presence):
            self._starts[change.presence.watcher] += 1

    async def _on_report(self, report: PlannerReport) -> None:
        self._report = self._clock(), report
        for decision in report.decisions:
            self._decisions[bool(decision.outcomes)] += decision.times - self._counted.get(decision.began, 0)
        self._counted = {decision.began: decision.times for decision in report.decisions}
