"""Results of all requests of a run."""

from __future__ import annotations

from collections import Counter

import msgspec

from tests.chaos.answers import FAILURES, Outcome
from tests.chaos.gaps import Gaps

_DETAILS = 50
"""Maximum number of failures with details."""


class Results(msgspec.Struct):
    """Counts of requests, and the first failures in words. Can be summed over frontends and processes."""

    outcomes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    tokens: int = 0
    failures: list[str] = []
    silences: dict[int, int] = {}
    """Number of requests by their longest silence, in whole seconds."""
    prefills: dict[str, int] = {}
    """The frontends' decisions about remote prefill, by outcome."""
    migrations: dict[str, int] = {}
    """Migrations by outcome and reason."""
    gaps: Gaps = msgspec.field(default_factory=Gaps)
    """Gaps between the tokens of streams."""

    def add(self, outcome: Outcome, tokens: int, longest_silence_s: float, reason: str, what: str) -> None:
        """Count a request. `what` describes it, for a failure."""
        self._count(self.outcomes, outcome.value)
        self.tokens += tokens
        silence = int(longest_silence_s)
        self.silences[silence] = self.silences.get(silence, 0) + 1
        if outcome in FAILURES:
            self._count(self.reasons, reason.partition(":")[0] or outcome.value)
            if len(self.failures) < _DETAILS:
                self.failures.append(f"{outcome.value}: {reason} [{what}]")

    def plus(self, other: Results) -> Results:
        """Return the sum of both."""
        return Results(
            dict(Counter(self.outcomes) + Counter(other.outcomes)),
            dict(Counter(self.reasons) + Counter(other.reasons)),
            self.tokens + other.tokens,
            [*self.failures, *other.failures],
            dict(Counter(self.silences) + Counter(other.silences)),
            dict(Counter(self.prefills) + Counter(other.prefills)),
            dict(Counter(self.migrations) + Counter(other.migrations)),
            self.gaps.plus(other.gaps),
        )

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return sum(self.outcomes.get(outcome.value, 0) for outcome in FAILURES)

    @property
    def defects(self) -> list[str]:
        """The defects among the results, in words."""
        found = [f"{self.failed} requests failed"] if self.failures else []
        too_long = self.gaps.too_long_count
        return found + ([f"{too_long} gaps were longer than the faults explain"] if too_long else [])

    @property
    def right(self) -> int:
        return self.outcomes.get(Outcome.RIGHT.value, 0)

    @staticmethod
    def _count(counts: dict[str, int], key: str) -> None:
        counts[key] = counts.get(key, 0) + 1
