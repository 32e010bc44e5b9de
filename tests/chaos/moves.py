"""Requests that are moved at random, in the way of operators: asked of the frontends over the bus."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from components.frontend.migration.scheduler import AtOnce
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.admin import (
    MigrationOrder,
    MigrationReport,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.migration.protocol import MigrationOutcome
from dynamo_local.core.names import Subjects
from dynamo_local.tasks import TaskGuard
from tests.chaos.settings import ChaosSettings

COLD = 0.1
"""Share of the moves that leave the KV behind."""

CHOSEN = 0.2
"""Share of the moves whose destination is drawn, among all workers that are there; the others go where it is freest."""

REFUSED, UNANSWERED, UNFINISHED = "refused", "frontend did not answer", "under way at the end"
"""Of orders, besides the outcomes of moves."""

MOST_ORDERS = AtOnce().in_all + 2
"""Under way of one frontend: as many as it moves at once, and some that wait for their turn. More would only end."""

_LOOK_EVERY_S = 0.1
_MOST_ROWS = 200
_ANSWER_S = 2.0
_MOVED_S = 60.0


@dataclass(frozen=True)
class Draw:
    """One order, of the request at this share of those that can be moved; and the worker at this share of those there
    are, or whichever is freest."""

    request: float
    destination: float | None
    cold: bool


def draw_order(rng: random.Random) -> Draw:
    request, destination, chosen, kind = (rng.random() for _ in range(4))
    return Draw(
        request,
        destination if chosen < CHOSEN else None,
        cold=kind < COLD,
    )


class RandomMoves:
    """Orders moves of requests of all frontends. What came of the orders is in `orders`, by outcome."""

    def __init__(
        self, bus: Bus, subjects: Subjects, fleet: FleetWatch, tasks: TaskGuard, settings: ChaosSettings
    ) -> None:
        self.orders: Counter[str] = Counter()
        self.whys: Counter[str] = Counter()
        """Why the requests that were not moved were not, with the outcome."""
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet
        self._tasks = tasks
        self._per_s = settings.moves_per_s
        self._rng = random.Random(f"{settings.seed} moves")
        self._under_way: dict[str, str] = {}
        """Requests that were ordered to move, and the leases of their frontends."""

    @property
    def done(self) -> int:
        """Requests that were moved as ordered."""
        return self.orders[MigrationOutcome.MOVED]

    def start(self) -> None:
        """Order moves until the tasks are closed."""
        if self._per_s > 0:
            self._tasks.spawn("moves by hand", self._order_on_and_on())

    async def _order_on_and_on(self) -> None:
        """As many as are due, of what could be moved a moment ago."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if loop.time() < due_at:
                continue
            rows = await self._movable()
            while rows and due_at <= loop.time():
                due_at += self._rng.expovariate(self._per_s)
                self._begin(draw_order(self._rng), rows)
            # What nobody could take is not made up for.
            due_at = max(due_at, loop.time() - _LOOK_EVERY_S)

    def _begin(self, draw: Draw, rows: list[tuple[str, RequestRow]]) -> None:
        """Take one of the rows, and order its move. Not awaited: moves overlap."""
        lease, row = rows.pop(int(draw.request * len(rows)))
        if not self._has_turn(lease):
            return
        workers = [worker.lease for worker in self._fleet.view.routable() if worker.lease != row.worker]
        chosen = workers[int(draw.destination * len(workers))] if workers and draw.destination is not None else None
        order = MigrationOrder((row.request_id,), destination=chosen, cold=draw.cold)
        self._under_way[row.request_id] = lease
        self._tasks.spawn("one move by hand", self._order(lease, row.request_id, order))

    async def _order(self, lease: str, request_id: str, order: MigrationOrder) -> None:
        """A bus that is away for a while, or a frontend that is killed, brings no answer."""
        outcome = UNFINISHED
        try:
            subject = self._subjects.requests(lease)
            outcome = self._outcome(await self._bus.ask(subject, order, MigrationReport, timeout_s=_MOVED_S))
        except BusError:
            outcome = UNANSWERED
        finally:
            self.orders[outcome] += 1
            del self._under_way[request_id]

    def _outcome(self, report: MigrationReport) -> str:
        result = report.results[0] if report.results else None
        # What never began has no destination.
        outcome = REFUSED if result is None or result.destination is None else result.outcome
        if outcome != MigrationOutcome.MOVED:
            # Without the subjects in it.
            why = "the request is over" if result is None else result.why.partition(" on dyn.")[0]
            self.whys[f"{outcome}: {why}"] += 1
        return outcome

    def _has_turn(self, lease: str) -> bool:
        return sum(each == lease for each in self._under_way.values()) < MOST_ORDERS

    async def _movable(self) -> list[tuple[str, RequestRow]]:
        """Requests that their frontends would move, with the frontends' leases."""
        leases = [each.lease for each in self._fleet.view.members() if each.role == "frontend"]
        asked = await asyncio.gather(*(self._rows(lease) for lease in leases if self._has_turn(lease)))
        rows = [found for of_one in asked for found in of_one]
        return [(lease, row) for lease, row in rows if row.stays is None and row.request_id not in self._under_way]

    async def _rows(self, lease: str) -> list[tuple[str, RequestRow]]:
        """One that has been killed does not keep the others from being asked."""
        subject, question = self._subjects.requests(lease), RequestsQuestion(_MOST_ROWS)
        try:
            answer = await self._bus.ask(subject, question, RequestsAnswer, timeout_s=_ANSWER_S)
        except BusError:
            return []
        return [(lease, row) for row in answer.requests]
