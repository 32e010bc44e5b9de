"""Migrations and routing among the series of a planner."""

from __future__ import annotations

from dynamo_local.core.planning.window import observe
from dynamo_local.planner.series import of_observation
from tests.unit.monitor.graph import DECODE, FRONTEND, ROUTER


def test_migrations_are_told_by_reason_and_outcome_with_their_bytes_and_the_last_gap() -> None:
    found = of_observation(observe(1.0, (), [FRONTEND, ROUTER], [], None, {}))
    assert {name: value for name, value in found.items() if name.startswith("migrations/")} == {
        "migrations/drain_migrated": 3,
        "migrations/hand_migrated": 2,
        "migrations/hand_stayed": 1,
        "migrations/pulled_mib": 3,
        "migrations/last_gap_ms": 18.4,
        "migrations/last_gap_steps": 1.93,
    }


def test_without_migrations_there_are_no_such_series() -> None:
    assert not any(name.startswith("migrations/") for name in of_observation(observe(1.0, (), [ROUTER], [], None, {})))


def test_routing_and_what_is_computed_again_are_told() -> None:
    found = of_observation(observe(0.0, (), [ROUTER, DECODE], [], None, {}))
    assert {name: value for name, value in found.items() if name.startswith("routing/")} == {
        "routing/assigned": 5,
        "routing/unassigned": 0,
        "routing/tokens": 900,
        "routing/predicted_cached_tokens": 640,
        "routing/predicted_cached_share": 640 / 900,
        "routing/pull_tokens": 50,
        "routing/recomputed_tokens": 30,
    }
