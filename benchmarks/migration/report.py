"""What a migration benchmark found, in tables and as figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.report import Figures, milliseconds, table
from benchmarks.harness.spread import bootstrap, median
from benchmarks.migration.orders import Migration


@dataclass(frozen=True)
class Arm:
    """A way to move a stream. `key`: in the figures."""

    name: str
    key: str
    cold: bool = False


MOVE = Arm("move", "warm")
REPLAY = Arm("replay", "cold", cold=True)
ARMS = (MOVE, REPLAY)


@dataclass(frozen=True)
class Moved:
    """A move, as the client of the stream and those of the streams beside it saw it."""

    result: Migration
    step_s: float
    """Median time between two tokens of the stream before (mean, if most of them came together)."""
    there_s: float
    """The same of the stream after: a step of the destination."""
    gap_s: float
    """Longest silence of the stream around the move."""
    took_s: float
    """From its beginning to the end of the gap."""
    before_tokens_per_s: float
    """Of the streams beside it, while it was decoding and nothing was ordered."""
    beside_tokens_per_s: float
    """Of them during the move."""

    @property
    def steps(self) -> float:
        """The gap in steps at this length: the mean of both workers', of which one may be slower."""
        return 2 * self.gap_s / (self.step_s + self.there_s)

    @property
    def slowed(self) -> float:
        """By how much the streams beside were slower during the move."""
        return self.before_tokens_per_s / self.beside_tokens_per_s

    @property
    def lost_s(self) -> float:
        """What a stream beside has lost by it."""
        return (1 - self.beside_tokens_per_s / self.before_tokens_per_s) * self.took_s


Turns = dict[Arm, list[Moved]]
"""What was measured for one length, round by round."""

_HEADERS = ("tokens", "gap ms", "steps", "steps at the frontend", "step here, ms", "there", "until the cut, ms")
_REPLAY_HEADERS = ("tokens", "gap ms", "replay / move")


def report(side: str, moved: dict[int, Turns]) -> list[Figures]:
    """Print the tables of one revision, and return the figures."""
    rows = {size: moved[size] for size in sorted(moved)}
    arms = [arm for arm in ARMS if all(arm in turns for turns in rows.values())]
    if MOVE in arms:
        title = f"Gaps of moved streams, as their clients saw them, {side}"
        _table(title, _HEADERS, rows, lambda turns: _gaps(turns[MOVE]))
    if len(arms) == len(ARMS):
        _table(f"Plain replay, round by round against the move, {side}", _REPLAY_HEADERS, rows, _replays)
    headers = ["tokens", *(title for arm in arms for title in (f"by {arm.name}", "lost, ms"))]
    title = f"By how much the streams beside were slower meanwhile, {side}"
    _table(title, headers, rows, lambda turns: _beside(turns, arms))
    return [_figures(size, turns) for size, turns in moved.items()]


def gaps_of(moved: dict[int, Turns]) -> dict[str, list[Figures]]:
    """The gaps by length and way."""
    return {
        f"{size:,} tokens, {arm.name}": [{"gap_s": move.gap_s, "steps": move.steps} for move in moves]
        for size, turns in sorted(moved.items())
        for arm, moves in turns.items()
    }


def _table(title: str, headers: Sequence[str], found: dict[int, Turns], cells: Callable[[Turns], list[str]]) -> None:
    table(title, headers, [[f"{size:,}", *cells(turns)] for size, turns in found.items()])


def _gaps(moves: Sequence[Moved]) -> list[str]:
    return [
        bootstrap([each.gap_s * 1e3 for each in moves]).shown(1),
        bootstrap([each.steps for each in moves]).shown(1),
        f"{median([each.result.gap_steps or 0.0 for each in moves]):.1f}",
        milliseconds(median([each.step_s for each in moves])),
        milliseconds(median([each.there_s for each in moves])),
        milliseconds(median([each.result.warm_s or 0.0 for each in moves]), 0),
    ]


def _replays(turns: Turns) -> list[str]:
    pairs = zip(turns[REPLAY], turns[MOVE], strict=True)
    return [
        milliseconds(median([each.gap_s for each in turns[REPLAY]])),
        bootstrap([replay.gap_s / move.gap_s for replay, move in pairs]).shown(1),
    ]


def _beside(turns: Turns, arms: Sequence[Arm]) -> list[str]:
    cells: list[str] = []
    for arm in arms:
        cells.append(bootstrap([each.slowed for each in turns[arm]]).shown())
        cells.append(bootstrap([each.lost_s * 1e3 for each in turns[arm]]).shown(0))
    return cells


def _figures(size: int, turns: Turns) -> Figures:
    moves = {
        arm.key: [
            {
                "gap_s": move.gap_s,
                "step_s": move.step_s,
                "there_s": move.there_s,
                "took_s": move.took_s,
                "warm_s": move.result.warm_s,
                "frontend_gap_s": move.result.gap_s,
                "before_tokens_per_s": move.before_tokens_per_s,
                "beside_tokens_per_s": move.beside_tokens_per_s,
            }
            for move in moves
        ]
        for arm, moves in turns.items()
    }
    return {"tokens": size, **moves}
