"""The sum of what several frontends report of their migrations."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Counts, Ended, MigrationCounts, Presence
from dynamo_local.core.migration.counts import migrations_of


def frontend(lease: str, counts: Counts | None) -> Presence:
    return Presence(lease, "Frontend", "frontend", lease, 1, "ready", counts=counts)


def test_those_of_all_frontends_are_added_up() -> None:
    first = MigrationCounts((Ended("drain", "moved", 3), Ended("hand", "stayed", 1)), 100, 0.02, 2.0)
    second = MigrationCounts((Ended("drain", "moved", 4),), 50, 0.01, 1.0)
    found = migrations_of(
        [frontend("a", Counts(moves=first)), frontend("b", Counts(moves=second)), frontend("c", None)]
    )
    assert found == MigrationCounts((Ended("drain", "moved", 7), Ended("hand", "stayed", 1)), 150, 0.02, 2.0)
    assert (found.moved, found.not_moved) == (7, 1)


def test_where_nobody_tells_nothing_is_known() -> None:
    assert migrations_of([frontend("a", Counts(assigned=1)), frontend("b", None)]) is None
