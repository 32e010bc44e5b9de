"""Counts how the migrations of a frontend end, and how long their gaps are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import Ended, MigrationCounts

_GAPS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_GAPS_STEPS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0)


class MigrationStatistics:
    """The counts of all migrations of one frontend so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Number of migrations, by (outcome, reason)."""
        self.gap_s = Histogram(_GAPS_S)
        """Seconds from the last token before a cut to the first token after it."""
        self.gap_steps = Histogram(_GAPS_STEPS)
        """The same, in decode steps of the request."""
        self.pulled_tokens = 0
        """Tokens whose KV was pulled from a source."""
        self.pulled_bytes = 0
        """Bytes of that KV, as far as the destinations report them."""
        self._last: MigrationResult | None = None
        """The last migration with a token after its cut."""
        self._listeners: list[Callable[[MigrationCounts], None]] = []

    @property
    def counts(self) -> MigrationCounts:
        """The counts as the frontend's presence reports them."""
        return MigrationCounts(
            tuple(Ended(reason, outcome, number) for (outcome, reason), number in sorted(self.outcomes.items())),
            self.pulled_bytes,
            None if self._last is None else self._last.gap_s,
            None if self._last is None else self._last.gap_steps,
        )

    def subscribe(self, listener: Callable[[MigrationCounts], None]) -> None:
        """Have `listener` called whenever a migration has ended."""
        self._listeners.append(listener)

    def pulled(self, tokens: int, kv_bytes: int | None) -> None:
        """Note that a destination has pulled the KV of so many tokens. `kv_bytes`: None if it did not report them."""
        self.pulled_tokens += tokens
        self.pulled_bytes += kv_bytes or 0

    def ended(self, result: MigrationResult, reason: str) -> None:
        """Note that a migration, begun for this reason, has ended."""
        self.outcomes[result.outcome, reason] += 1
        if result.gap_s is not None:
            self._last = result
            self.gap_s.observe(result.gap_s)
        if result.gap_steps is not None:
            self.gap_steps.observe(result.gap_steps)
        for listener in self._listeners:
            listener(self.counts)
