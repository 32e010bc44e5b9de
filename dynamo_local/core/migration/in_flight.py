"""What the moves of a frontend do to the loads of workers before these can tell it. Pure.

A load is a little old when it is read, and a move takes a while. So what comes is counted with its destination, and no
more with its source, from the moment at which a move begins until both have measured their load after its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_local.core.fleet.freeness import Usage
from dynamo_local.core.messages.presence import Presence

FORGOTTEN_S = 10.0
"""A move that ended so long ago is in every load that is told: an older one is stale."""


@dataclass
class InFlightMigration:
    """One move of one request. `source` and `destination` are leases, `tokens` its context."""

    source: str
    destination: str
    tokens: int
    ended_at: float | None = None


class InFlightMigrations:
    """All moves under way, and those just done. Times are CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._trips: list[InFlightMigration] = []

    @property
    def under_way(self) -> int:
        """Moves that have not ended."""
        return sum(trip.ended_at is None for trip in self._trips)

    def leaving(self, worker: str) -> int:
        """Moves under way from it."""
        return sum(trip.ended_at is None and trip.source == worker for trip in self._trips)

    def begin(self, source: str, destination: str, tokens: int, now: float) -> InFlightMigration:
        """A move begins."""
        self._trips = [trip for trip in self._trips if trip.ended_at is None or now - trip.ended_at < FORGOTTEN_S]
        trip = InFlightMigration(source, destination, tokens)
        self._trips.append(trip)
        return trip

    def end(self, trip: InFlightMigration, now: float, *, moved: bool) -> None:
        """It has ended."""
        if moved:
            trip.ended_at = now
        else:
            self._trips.remove(trip)

    def change(self, worker: Presence) -> Usage:
        """What is to be added to the load that a worker tells; negative for what leaves it."""
        told_at = -math.inf if worker.load is None or worker.load.at is None else worker.load.at
        untold = [trip for trip in self._trips if trip.ended_at is None or trip.ended_at >= told_at]
        coming = _sum(trip for trip in untold if trip.destination == worker.lease)
        going = _sum(trip for trip in untold if trip.source == worker.lease)
        return Usage(coming[0] - going[0], requests=coming[1] - going[1])


def _sum(trips: Iterable[InFlightMigration]) -> tuple[int, int]:
    """Tokens and requests."""
    tokens = [trip.tokens for trip in trips]
    return sum(tokens), len(tokens)
