"""Service level objectives: limits of an answer's latencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.core.errors import UsageError
from dynamo_local.load.results.quantities import parse_duration, shown_duration
from dynamo_local.load.results.records import Record


def _longest_gap(record: Record) -> float | None:
    return max(record.gaps_s, default=None)


_MEASURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "itl": lambda record: record.itl_s,
    "gap": _longest_gap,
    "e2e": lambda record: record.e2e_s,
}
SYNTAX = "ttft=500ms,itl=50ms; also gap (longest silence between two chunks) and e2e"


@dataclass(frozen=True)
class Objective:
    """Limits of latencies that an answer must keep. `limits_s`: pairs of a latency's name and its limit in seconds."""

    limits_s: tuple[tuple[str, float], ...]

    def missed(self, record: Record) -> tuple[str, ...]:
        """Return the limits that a completed request did not keep. A limit on a latency that the request does not have
        (gaps of an answer with one token) counts as kept, but a missing first token does not."""
        values = ((name, limit_s, _MEASURES[name](record)) for name, limit_s in self.limits_s)
        return tuple(
            name for name, limit_s, value in values if (value > limit_s if value is not None else name == "ttft")
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {shown_duration(limit_s)}" for name, limit_s in self.limits_s)


def parse_objective(text: str) -> Objective:
    """Parse an objective such as `ttft=500ms,itl=50ms`. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, limit = (piece.strip() for piece in part.partition("="))
        if name not in _MEASURES or not equals or name in limits:
            raise UsageError(f"{part.strip()!r} is not an objective", f"write {SYNTAX}")
        limits[name] = parse_duration(limit)
    return Objective(tuple(limits.items()))
