"""What moves do to loads that do not tell of them yet."""

from __future__ import annotations

from dynamo_local.core.fleet.freeness import Usage
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.migration.in_flight import FORGOTTEN_S, InFlightMigrations

NOTHING = Usage(0, requests=0)


def worker(lease: str, at: float | None = 5.0) -> Presence:
    return Presence(lease, "W", "aggregated", lease, 1, "ready", load=Load(1, 0, 0.1, at=at))


def test_what_moves_counts_with_its_destination_and_no_more_with_its_source() -> None:
    traffic = InFlightMigrations()
    traffic.begin("a", "b", 100, 1.0)
    traffic.begin("a", "c", 30, 1.0)
    assert traffic.change(worker("a")) == Usage(-130, requests=-2)
    assert traffic.change(worker("b")) == Usage(100, requests=1)
    assert traffic.change(worker("d")) == NOTHING
    assert (traffic.leaving("a"), traffic.leaving("b"), traffic.under_way) == (2, 0, 2)


def test_a_move_that_was_made_counts_until_it_is_in_the_load() -> None:
    traffic = InFlightMigrations()
    trip = traffic.begin("a", "b", 100, 1.0)
    traffic.end(trip, 5.5, moved=True)
    assert traffic.under_way == 0
    assert traffic.change(worker("b", 5.0)) == traffic.change(worker("b", None)) == Usage(100, requests=1)
    assert traffic.change(worker("b", 6.0)) == NOTHING


def test_one_that_was_not_made_never_counts() -> None:
    traffic = InFlightMigrations()
    trip = traffic.begin("a", "b", 100, 1.0)
    traffic.end(trip, 2.0, moved=False)
    assert traffic.change(worker("b")) == NOTHING


def test_old_ones_are_forgotten() -> None:
    traffic = InFlightMigrations()
    traffic.end(traffic.begin("a", "b", 100, 1.0), 2.0, moved=True)
    traffic.begin("a", "c", 1, 2.0 + FORGOTTEN_S)
    assert traffic.change(worker("b", None)) == NOTHING
