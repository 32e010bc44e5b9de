"""What a turn of the benchmark counts."""

from __future__ import annotations

import pytest

from benchmarks.migration.rebalance import samples_of
from benchmarks.migration.rebalance_report import PREEMPTIONS, Turn
from dynamo_local.load.figures import Record


def record(*chunks_s: float, error: str = "") -> Record:
    return Record(0.0, 10, 5, 1.0, list(chunks_s), chunks_s[-1], len(chunks_s), error=error)


TURN = Turn(
    "on",
    1,
    (record(2.0, 2.1, 2.2), record(1.5, 1.6, 2.5), record(1.2, error="timeout")),
    {"migrated rebalance": 3, "migrated room": 1, "stayed rebalance": 2, "ended room": 1, PREEMPTIONS: 7},
    0.5,
)


def test_stalls_are_counted_by_answers() -> None:
    assert TURN.stalled == 1
    assert TURN.longest_gaps_s == pytest.approx([0.1, 0.9])
    assert TURN.failed == 1


def test_moves_are_told_apart_by_what_came_of_them() -> None:
    assert (TURN.moved("rebalance"), TURN.moved("room"), TURN.not_moved) == (3, 1, 3)


def test_samples_are_found_by_their_name_with_the_values_of_their_labels() -> None:
    text = """# HELP moves_total What
moves_total{outcome="migrated",reason="room"} 4.0
moves_total{outcome="migrated",reason="drain"} 1.0
more_moves_total 3.0
preempted 2.0
"""
    assert samples_of(text, "moves_total") == {"migrated room": 4.0, "migrated drain": 1.0}
    assert samples_of(text, "preempted") == {"": 2.0}
