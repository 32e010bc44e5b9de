"""Orders random migrations from the frontends over the bus, as `dynamo migrate` does."""

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
    RequestLine,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.migration.protocol import MigrationOutcome
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.chaos.settings import ChaosSettings

COLD = 0.1
"""Share of the migrations that leave the KV behind."""

CHOSEN = 0.2
"""Share of the migrations with a random destination; the others go to the freest worker."""

REFUSED, UNANSWERED, UNFINISHED = "refused", "frontend did not answer", "under way at the end"
"""Outcomes of orders beside the outcomes of migrations."""

MOST_ORDERS = AtOnce().in_all + 2
"""Maximum number of orders to a frontend at a time: as many as it executes at once, and some that wait. Requests of
further ones would only end while they wait."""

_LOOK_EVERY_S = 0.1
_MOST_ROWS = 200
_ANSWER_S = 2.0
_MIGRATED_S = 60.0


@dataclass(frozen=True)
class Draw:
    """A drawn order. `request` and `destination` choose from their lists, by the share of the list, 0 to 1;
    `destination` None: the freest worker."""

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


class RandomMigrations:
    """Orders migrations of requests of all frontends. `orders` counts the orders by outcome."""

    def __init__(
        self, bus: Bus, subjects: Subjects, fleet: FleetWatch, tasks: TaskGuard, settings: ChaosSettings
    ) -> None:
        self.orders: Counter[str] = Counter()
        self.whys: Counter[str] = Counter()
        """Reasons why requests did not migrate, with the outcome."""
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet
        self._tasks = tasks
        self._per_s = settings.migrations_per_s
        self._rng = random.Random(f"{settings.seed} migrations")
        self._under_way: dict[str, str] = {}
        """Requests with an order, and the leases of their frontends."""

    @property
    def done(self) -> int:
        """Number of requests that migrated as ordered."""
        return self.orders[MigrationOutcome.MIGRATED]

    def start(self) -> None:
        """Order migrations until the tasks are closed."""
        if self._per_s > 0:
            self._tasks.spawn("ordered migrations", self._order_on_and_on())

    async def _order_on_and_on(self) -> None:
        """Give the orders that are due, to requests that could migrate a moment ago."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if loop.time() < due_at:
                continue
            rows = await self._migratable()
            while rows and due_at <= loop.time():
                due_at += self._rng.expovariate(self._per_s)
                self._begin(draw_order(self._rng), rows)
            # Orders that were due while no request could migrate are dropped.
            due_at = max(due_at, loop.time() - _LOOK_EVERY_S)

    def _begin(self, draw: Draw, rows: list[tuple[str, RequestLine]]) -> None:
        """Take one of the rows, and order its migration in the background, since migrations overlap."""
        lease, row = rows.pop(int(draw.request * len(rows)))
        if not self._has_turn(lease):
            return
        workers = [worker.lease for worker in self._fleet.view.routable() if worker.lease != row.worker]
        chosen = workers[int(draw.destination * len(workers))] if workers and draw.destination is not None else None
        order = MigrationOrder((row.request,), destination=chosen, cold=draw.cold)
        self._under_way[row.request] = lease
        self._tasks.spawn("an ordered migration", self._order(lease, row.request, order))

    async def _order(self, lease: str, request_id: str, order: MigrationOrder) -> None:
        """Send an order, and count its outcome. Without the bus or the frontend there is no answer."""
        outcome = UNFINISHED
        try:
            subject = self._subjects.requests(lease)
            outcome = self._outcome(await self._bus.ask(subject, order, MigrationReport, timeout_s=_MIGRATED_S))
        except BusError:
            outcome = UNANSWERED
        finally:
            self.orders[outcome] += 1
            del self._under_way[request_id]

    def _outcome(self, report: MigrationReport) -> str:
        result = report.results[0] if report.results else None
        # A migration that was refused has no destination.
        outcome = REFUSED if result is None or result.worker is None else result.outcome
        if outcome != MigrationOutcome.MIGRATED:
            # Cut before the subject, which would make every reason unique.
            why = "the request is over" if result is None else result.why.partition(" on dyn.")[0]
            self.whys[f"{outcome}: {why}"] += 1
        return outcome

    def _has_turn(self, lease: str) -> bool:
        return sum(each == lease for each in self._under_way.values()) < MOST_ORDERS

    async def _migratable(self) -> list[tuple[str, RequestLine]]:
        """Return the requests that can migrate, with the leases of their frontends."""
        leases = [each.lease for each in self._fleet.view.members() if each.role == "frontend"]
        asked = await asyncio.gather(*(self._rows(lease) for lease in leases if self._has_turn(lease)))
        rows = [found for of_one in asked for found in of_one]
        return [(lease, row) for lease, row in rows if row.stays is None and row.request not in self._under_way]

    async def _rows(self, lease: str) -> list[tuple[str, RequestLine]]:
        """Return a frontend's requests; none if the frontend does not answer."""
        subject, question = self._subjects.requests(lease), RequestsQuestion(_MOST_ROWS)
        try:
            answer = await self._bus.ask(subject, question, RequestsAnswer, timeout_s=_ANSWER_S)
        except BusError:
            return []
        return [(lease, row) for row in answer.requests]
