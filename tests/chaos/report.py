"""What a run has found: a table for people, JSON for others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.memory import Growth
from tests.chaos.tally import Tally


@dataclass
class Report:
    """Everything about one run. It is good if `defects` is empty."""

    engine: str
    seed: int
    seconds: float
    tally: Tally = field(default_factory=Tally)
    faults: dict[str, int] = field(default_factory=dict)
    passed_over: int = 0
    """Draws for which there was no target: too few workers were left."""
    orders: dict[str, int] = field(default_factory=dict)
    """To move a request, by what came of them."""
    unmoved: dict[str, int] = field(default_factory=dict)
    """Of the requests that were to be moved by hand, those that were not, by outcome and why."""
    struck: dict[str, int] = field(default_factory=dict)
    """Moves under way from or to the worker that a fault was done to, by fault and how far they had come."""
    memory: dict[str, Growth] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fault_count(self) -> int:
        return sum(self.faults.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": self.faults,
            "fault_count": self.fault_count,
            "passed_over": self.passed_over,
            "requests": self.tally.requests,
            "tokens": self.tally.tokens,
            "outcomes": self.tally.outcomes,
            "reasons": self.tally.reasons,
            "prefills": self.tally.prefills,
            "moves": self.tally.moves,
            "orders": self.orders,
            "unmoved": self.unmoved,
            "struck": self.struck,
            "longest_silence_s": {str(key): count for key, count in sorted(self.tally.silences.items())},
            "longest_gap_s": self.tally.gaps.longest_s,
            "gaps_too_long": self.tally.gaps.too_long_count,
            "memory": {name: asdict(growth) for name, growth in self.memory.items()},
            "failures": self.tally.failures,
            "defects": self.defects,
            "notes": self.notes,
        }

    def as_text(self) -> str:
        tally = self.tally
        lines = [
            f"chaos on {self.engine}, seed {self.seed}: {self.fault_count} faults in {self.seconds:.0f} s, "
            f"{tally.requests} requests, {tally.tokens} tokens",
            *self.notes,
            "",
            *_table("fault", self.faults),
            "",
            *_table("requests", tally.outcomes),
            "",
            *_table("longest silence", _silences(tally)),
            "",
            *(
                [*_seconds("longest gap that it had a part in", self.tally.gaps.longest_s), ""]
                if self.tally.gaps.longest_s
                else []
            ),
            *([*_table("remote prefill", tally.prefills), ""] if tally.prefills else []),
            *([*_table("moves", tally.moves), ""] if tally.moves else []),
            *([*_table(f"orders to move ({sum(self.orders.values())})", self.orders), ""] if self.orders else []),
            *([*_table("not moved by hand, because", self.unmoved), ""] if self.unmoved else []),
            *([*_table("in the middle of moves", self.struck), ""] if self.struck else []),
            f"{'memory and files':<44}{'settled':>10}{'end':>10}",
            *(
                f"  {name:<42}{growth.settled_mb:>7} MB{growth.end_mb:>7} MB"
                f"{growth.settled_files:>6} -> {growth.end_files} files"
                for name, growth in self.memory.items()
            ),
        ]
        if tally.reasons:
            lines += ["", *_table("failures, by reason", tally.reasons)]
        lines += ["", *(f"FAILED  {failure}" for failure in tally.failures)]
        lines += [f"GAP     {gap}" for gap in self.tally.gaps.too_long]
        lines += [f"DEFECT  {defect}" for defect in self.defects]
        lines += [f"{'good' if not self.defects else 'NOT GOOD'}: seed {self.seed}"]
        return "\n".join(lines)


def _table(title: str, counts: dict[str, int]) -> list[str]:
    rows = sorted(counts.items(), key=lambda row: -row[1])
    return [f"{title:<44}{'count':>10}", *(f"  {name:<42}{count:>10}" for name, count in rows)]


def _seconds(title: str, values: dict[str, float]) -> list[str]:
    rows = sorted(values.items(), key=lambda row: -row[1])
    return [f"{title:<44}{'seconds':>10}", *(f"  {name:<42}{value:>10.1f}" for name, value in rows)]


_BOUNDS_S = (1, 2, 3, 5, 10, 20, 60)


def _silences(tally: Tally) -> dict[str, int]:
    """Requests by their longest silence, in classes."""
    counts: dict[str, int] = {}
    for seconds, count in sorted(tally.silences.items()):
        bound = next((bound for bound in _BOUNDS_S if seconds < bound), None)
        name = "longer" if bound is None else f"under {bound} s"
        counts[name] = counts.get(name, 0) + count
    return counts
