"""What a migration benchmark tells of a move."""

from __future__ import annotations

import pytest

from benchmarks.migration.orders import Migration
from benchmarks.migration.report import MOVE, REPLAY, Moved, report


def moved(gap_s: float = 0.03, beside_tokens_per_s: float = 320.0) -> Moved:
    return Moved(
        Migration("r", "migrated", "", None, warm_s=0.1, gap_s=gap_s, gap_steps=1.5),
        step_s=0.02,
        there_s=0.01,
        gap_s=gap_s,
        took_s=0.2,
        before_tokens_per_s=400.0,
        beside_tokens_per_s=beside_tokens_per_s,
    )


def test_a_gap_is_told_in_steps_of_both_workers_and_streams_beside_are_compared_with_themselves_before() -> None:
    move = moved()
    assert move.steps == pytest.approx(2)
    assert move.slowed == pytest.approx(1.25)
    assert move.lost_s == pytest.approx(0.04)
    assert moved(beside_tokens_per_s=500.0).lost_s < 0


def test_arms_that_were_left_out_are_in_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    (figures,) = report("ours", {256: {MOVE: [moved(), moved(0.05)]}})
    assert [move["gap_s"] for move in figures["warm"]] == [0.03, 0.05]
    assert set(figures) == {"tokens", "warm"}
    printed = capsys.readouterr().out
    assert "by move" in printed
    assert "replay" not in printed
    report("ours", {256: {REPLAY: [moved()]}})
    assert "by replay" in capsys.readouterr().out
