"""The sum of what several frontends report of their migrations."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Counts, EndedMigrations, MigrationCounts, Presence
from dynamo_local.core.migration.protocol import migrations_of


def frontend(lease: str, counts: Counts | None) -> Presence:
    return Presence(lease, "Frontend", "frontend", lease, 1, "ready", counts=counts)


def test_those_of_all_frontends_are_added_up() -> None:
    first = MigrationCounts(
        (EndedMigrations("drain", "migrated", 3), EndedMigrations("hand", "stayed", 1)), 100, 0.02, 2.0
    )
    second = MigrationCounts((EndedMigrations("drain", "migrated", 4),), 50, 0.01, 1.0)
    found = migrations_of(
        [frontend("a", Counts(migrations=first)), frontend("b", Counts(migrations=second)), frontend("c", None)]
    )
    assert found == MigrationCounts(
        (EndedMigrations("drain", "migrated", 7), EndedMigrations("hand", "stayed", 1)), 150, 0.02, 2.0
    )
    assert (found.completed, found.not_completed) == (7, 1)


def test_where_nobody_tells_nothing_is_known() -> None:
    assert migrations_of([frontend("a", Counts(assigned=1)), frontend("b", None)]) is None
