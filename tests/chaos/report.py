"""The report of a run, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.memory import Growth
from tests.chaos.results import Results


@dataclass
class Report:
    """The findings of a run, which is good if `defects` is empty."""

    engine: str
    seed: int
    seconds: float
    results: Results = field(default_factory=Results)
    faults: dict[str, int] = field(default_factory=dict)
    passed_over: int = 0
    """Number of drawn faults without a target, because too few workers were left."""
    orders: dict[str, int] = field(default_factory=dict)
    """Orders to migrate a request, by outcome."""
    not_migrated: dict[str, int] = field(default_factory=dict)
    """Orders after which the request did not migrate, by outcome and reason."""
    hit_migrations: dict[str, int] = field(default_factory=dict)
    """Migrations in flight at a worker when a fault hit it, by fault and progress of the migration."""
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
            "requests": self.results.requests,
            "tokens": self.results.tokens,
            "outcomes": self.results.outcomes,
            "reasons": self.results.reasons,
            "prefills": self.results.prefills,
            "migrations": self.results.migrations,
            "orders": self.orders,
            "not_migrated": self.not_migrated,
            "hit_migrations": self.hit_migrations,
            "longest_silence_s": {str(key): count for key, count in sorted(self.results.silences.items())},
            "longest_gap_s": self.results.gaps.longest_s,
            "gaps_too_long": self.results.gaps.too_long_count,
            "memory": {name: asdict(growth) for name, growth in self.memory.items()},
            "failures": self.results.failures,
            "defects": self.defects,
            "notes": self.notes,
        }

    def as_text(self) -> str:
        results = self.results
        lines = [
            f"chaos on {self.engine}, seed {self.seed}: {self.fault_count} faults in {self.seconds:.0f} s, "
            f"{results.requests} requests, {results.tokens} tokens",
            *self.notes,
            "",
            *_table("fault", self.faults),
            "",
            *_table("requests", results.outcomes),
            "",
            *_table("longest silence", _silences(results)),
            "",
            *(
                [*_seconds("longest gap at a fault", self.results.gaps.longest_s), ""]
                if self.results.gaps.longest_s
                else []
            ),
            *([*_table("remote prefill", results.prefills), ""] if results.prefills else []),
            *([*_table("migrations", results.migrations), ""] if results.migrations else []),
            *([*_table(f"orders to migrate ({sum(self.orders.values())})", self.orders), ""] if self.orders else []),
            *([*_table("not migrated as ordered, because", self.not_migrated), ""] if self.not_migrated else []),
            *([*_table("migrations hit by a fault", self.hit_migrations), ""] if self.hit_migrations else []),
            f"{'memory and files':<44}{'settled':>10}{'end':>10}",
            *(
                f"  {name:<42}{growth.settled_mb:>7} MB{growth.end_mb:>7} MB"
                f"{growth.settled_files:>6} -> {growth.end_files} files"
                for name, growth in self.memory.items()
            ),
        ]
        if results.reasons:
            lines += ["", *_table("failures, by reason", results.reasons)]
        lines += ["", *(f"FAILED  {failure}" for failure in results.failures)]
        lines += [f"GAP     {gap}" for gap in self.results.gaps.too_long]
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


def _silences(results: Results) -> dict[str, int]:
    """Return the number of requests by their longest silence, in classes."""
    counts: dict[str, int] = {}
    for seconds, count in sorted(results.silences.items()):
        bound = next((bound for bound in _BOUNDS_S if seconds < bound), None)
        name = "longer" if bound is None else f"under {bound} s"
        counts[name] = counts.get(name, 0) + count
    return counts
