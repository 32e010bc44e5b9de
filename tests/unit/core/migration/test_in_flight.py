"""The effect of migrations on loads that do not show them yet."""

from __future__ import annotations

from dynamo_local.core.fleet.freeness import Usage
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.migration.protocol import FORGOTTEN_S, InFlightMigrations

NOTHING = Usage(0, requests=0)


def worker(lease: str, at: float | None = 5.0) -> Presence:
    return Presence(lease, "W", "aggregated", lease, 1, "ready", load=Load(1, 0, 0.1, at=at))


def test_a_migration_counts_with_its_destination_and_no_more_with_its_source() -> None:
    in_flight = InFlightMigrations()
    in_flight.begin("a", "b", 100, 1.0)
    in_flight.begin("a", "c", 30, 1.0)
    assert in_flight.change(worker("a")) == Usage(-130, requests=-2)
    assert in_flight.change(worker("b")) == Usage(100, requests=1)
    assert in_flight.change(worker("d")) == NOTHING
    assert (in_flight.leaving("a"), in_flight.leaving("b"), in_flight.in_progress) == (2, 0, 2)


def test_a_migration_that_has_ended_counts_until_the_load_was_measured_after_it() -> None:
    in_flight = InFlightMigrations()
    entry = in_flight.begin("a", "b", 100, 1.0)
    in_flight.end(entry, 5.5, moved=True)
    assert in_flight.in_progress == 0
    assert in_flight.change(worker("b", 5.0)) == in_flight.change(worker("b", None)) == Usage(100, requests=1)
    assert in_flight.change(worker("b", 6.0)) == NOTHING


def test_a_request_that_stayed_counts_no_more() -> None:
    in_flight = InFlightMigrations()
    entry = in_flight.begin("a", "b", 100, 1.0)
    in_flight.end(entry, 2.0, moved=False)
    assert in_flight.change(worker("b")) == NOTHING


def test_old_migrations_are_forgotten() -> None:
    in_flight = InFlightMigrations()
    in_flight.end(in_flight.begin("a", "b", 100, 1.0), 2.0, moved=True)
    in_flight.begin("a", "c", 1, 2.0 + FORGOTTEN_S)
    assert in_flight.change(worker("b", None)) == NOTHING
