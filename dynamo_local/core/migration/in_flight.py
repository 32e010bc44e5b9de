"""The effect of a frontend's migrations on the loads of workers, until the workers' own reports show it. Pure.

A worker's reported load is a little old, and a migration takes a while. So a migrating request counts as load of its
destination, and no more of its source, from the migration's begin until both workers have reported a load that they
measured after its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_local.core.fleet.freeness import Usage
from dynamo_local.core.messages.presence import Presence

FORGOTTEN_S = 10.0
"""A migration that ended so long ago is in every reported load: an older load is not used."""


@dataclass
class InFlightMigration:
    """A migration under way. `source` and `destination` are leases, `tokens` is the length of its context."""

    source: str
    destination: str
    tokens: int
    ended_at: float | None = None


class InFlightMigrations:
    """All migrations in progress, and those that have just ended. Times are CLOCK_MONOTONIC, in seconds."""

    def __init__(self) -> None:
        self._migrations: list[InFlightMigration] = []

    @property
    def in_progress(self) -> int:
        """Number of migrations that have not ended."""
        return sum(each.ended_at is None for each in self._migrations)

    def leaving(self, worker: str) -> int:
        """Return the number of migrations in progress from this worker."""
        return sum(each.ended_at is None and each.source == worker for each in self._migrations)

    def begin(self, source: str, destination: str, tokens: int, now: float) -> InFlightMigration:
        """Note that a migration begins."""
        self._migrations = [
            each for each in self._migrations if each.ended_at is None or now - each.ended_at < FORGOTTEN_S
        ]
        migration = InFlightMigration(source, destination, tokens)
        self._migrations.append(migration)
        return migration

    def end(self, migration: InFlightMigration, now: float, *, moved: bool) -> None:
        """Note that the migration has ended. `moved`: the request was cut over to the destination."""
        if moved:
            migration.ended_at = now
        else:
            self._migrations.remove(migration)

    def change(self, worker: Presence) -> Usage:
        """Return what is to be added to the load that a worker has reported; negative for what leaves the worker."""
        measured_at = -math.inf if worker.load is None or worker.load.at is None else worker.load.at
        unreported = [each for each in self._migrations if each.ended_at is None or each.ended_at >= measured_at]
        coming = _sum(each for each in unreported if each.destination == worker.lease)
        going = _sum(each for each in unreported if each.source == worker.lease)
        return Usage(coming[0] - going[0], requests=coming[1] - going[1])


def _sum(migrations: Iterable[InFlightMigration]) -> tuple[int, int]:
    """Return the tokens and the number of these migrations' requests."""
    tokens = [migration.tokens for migration in migrations]
    return sum(tokens), len(tokens)
