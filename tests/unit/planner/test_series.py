"""Moves among the series of a planner."""

from __future__ import annotations

from dynamo_local.core.planning.observation import observe
from dynamo_local.planner.series import of_observation
from tests.unit.monitor.graph import FRONTEND, ROUTER


def test_moves_are_told_by_reason_and_outcome_with_their_bytes_and_the_last_gap() -> None:
    found = of_observation(observe(1.0, (), [FRONTEND, ROUTER], [], None, {}))
    assert {name: value for name, value in found.items() if name.startswith("moves/")} == {
        "moves/drain_moved": 3,
        "moves/hand_moved": 2,
        "moves/hand_stayed": 1,
        "moves/pulled_mib": 3,
        "moves/last_gap_ms": 18.4,
        "moves/last_gap_steps": 1.93,
    }


def test_where_nobody_moves_anything_there_are_no_such_series() -> None:
    assert not any(name.startswith("moves/") for name in of_observation(observe(1.0, (), [ROUTER], [], None, {})))
