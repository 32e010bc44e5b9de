"""Turns with rebalancing beside turns without. Pure arithmetic, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from benchmarks.harness.report import Figures, milliseconds, table
from benchmarks.harness.spread import quantile
from dynamo_local.load.figures import Record

Arm = Literal["off", "on"]
PREEMPTIONS = "preemptions"
STALL_S = 0.5
"""A silence in a stream of which a reader takes notice: some twenty steps."""


@dataclass(frozen=True)
class Turn:
    """A turn of an arm under the load that `seed` draws. `counted`: moves by outcome and reason, and preemptions;
    `busy_cores`: of the whole machine, whoever used them."""

    arm: Arm
    seed: int
    records: tuple[Record, ...]
    counted: Mapping[str, int]
    busy_cores: float

    @property
    def failed(self) -> int:
        return sum(not record.is_completed for record in self.records)

    @property
    def ttfts_s(self) -> list[float]:
        return [record.ttft_s for record in self.records if record.ttft_s is not None]

    @property
    def gaps_s(self) -> list[float]:
        """From token to token, of all answers together."""
        return [gap for record in self.records for gap in record.gaps_s]

    @property
    def longest_gaps_s(self) -> list[float]:
        """The longest silence of each answer."""
        return [max(record.gaps_s) for record in self.records if record.gaps_s]

    @property
    def per_token_s(self) -> list[float]:
        """Of each answer, from its sending to its end, shared among its tokens."""
        return [record.e2e_s / record.tokens for record in self.records if record.e2e_s is not None and record.tokens]

    @property
    def stalled(self) -> int:
        """Answers with a silence of `STALL_S`."""
        return sum(gap >= STALL_S for gap in self.longest_gaps_s)

    def moved(self, reason: str) -> int:
        return self.counted.get(f"migrated {reason}", 0)

    @property
    def not_moved(self) -> int:
        """Moves that came to nothing."""
        return sum(
            count for name, count in self.counted.items() if name != PREEMPTIONS and not name.startswith("migrated ")
        )


_COLUMNS: Mapping[str, Callable[[Turn], str]] = {
    "seed": lambda turn: str(turn.seed),
    "rebalancing": lambda turn: turn.arm,
    "answers": lambda turn: str(len(turn.records)),
    "failed": lambda turn: str(turn.failed),
    "TTFT ms p50": lambda turn: milliseconds(quantile(turn.ttfts_s, 0.5), 0),
    "p99": lambda turn: milliseconds(quantile(turn.ttfts_s, 0.99), 0),
    "ITL ms p50": lambda turn: milliseconds(quantile(turn.gaps_s, 0.5)),
    "p99 ": lambda turn: milliseconds(quantile(turn.gaps_s, 0.99)),
    "p99.9": lambda turn: milliseconds(quantile(turn.gaps_s, 0.999), 0),
    "longest gap of an answer, s p95": lambda turn: f"{quantile(turn.longest_gaps_s, 0.95):.2f}",
    "p99  ": lambda turn: f"{quantile(turn.longest_gaps_s, 0.99):.2f}",
    "answers that stall": lambda turn: str(turn.stalled),
    "whole answer / tokens, ms p99": lambda turn: milliseconds(quantile(turn.per_token_s, 0.99), 0),
    "preemptions": lambda turn: str(turn.counted.get(PREEMPTIONS, 0)),
    "moved to level": lambda turn: str(turn.moved("rebalance")),
    "to make room": lambda turn: str(turn.moved("room")),
    "not moved": lambda turn: str(turn.not_moved),
    "busy cores": lambda turn: f"{turn.busy_cores:.2f}",
}


def told(turn: Turn) -> str:
    """Renders a turn as a line."""
    return ", ".join(f"{name.strip()} {show(turn)}" for name, show in _COLUMNS.items())


def report(turns: Sequence[Turn]) -> Figures:
    """Print the tables."""
    ordered = sorted(turns, key=lambda turn: (turn.seed, turn.arm))
    table(
        f"Stall: a silence of {STALL_S:g} s or more",
        [name.strip() for name in _COLUMNS],
        [[show(turn) for show in _COLUMNS.values()] for turn in ordered],
    )
    return {"turns": [_figures(turn) for turn in turns], "together": {arm: _of(arm, turns) for arm in ("off", "on")}}


def _figures(turn: Turn) -> Figures:
    return {
        "arm": turn.arm,
        "seed": turn.seed,
        "counted": dict(turn.counted),
        "busy_cores": turn.busy_cores,
        "shown": {name.strip(): show(turn) for name, show in _COLUMNS.items()},
        "records": msgspec.to_builtins(
            [
                msgspec.structs.replace(record, chunks_s=[round(at, 4) for at in record.chunks_s])
                for record in turn.records
            ]
        ),
    }


def _of(arm: str, turns: Iterable[Turn]) -> Figures:
    mine = [turn for turn in turns if turn.arm == arm]
    return {
        "ttft_p99_s": quantile([each for turn in mine for each in turn.ttfts_s], 0.99),
        "itl_p99_s": quantile([each for turn in mine for each in turn.gaps_s], 0.99),
        "longest_gap_p99_s": quantile([each for turn in mine for each in turn.longest_gaps_s], 0.99),
        "stalled": sum(turn.stalled for turn in mine),
        "preemptions": sum(turn.counted.get(PREEMPTIONS, 0) for turn in mine),
    }
