"""A migration in progress, and what a request's earlier migrations mean for its next one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import EndedMigrations, MigrationCounts
from dynamo_local.core.migration.protocol import again_after_s


@dataclass
class MigrationState:
    """A migration of a request, as its frontend knows it. `destination` is a lease; times are CLOCK_MONOTONIC, in
    seconds."""

    destination: str
    reason: str
    """Why the request migrates: one of core/migration/protocol.py's REASONS."""
    cold: bool = False
    """Whether the KV is left behind, and computed anew at the destination."""
    floor: float | None = None
    """The destination refuses if the request would make it less free than this (core/fleet/freeness.py)."""
    unanswered: bool = False
    """Whether the destination was asked and has not answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request's log, or the destination's presence, has changed."""
    begun_at: float = field(default_factory=time.monotonic)
    cut_at: float | None = None
    left_at: float | None = None
    """When the last token before the cut was accepted."""
    arrived_at: float | None = None
    """When the first token after the cut was accepted."""

    def accept(self, now: float) -> None:
        """Note that tokens were accepted."""
        if self.cut_at is not None and self.arrived_at is None:
            self.arrived_at = now
        self.changed.set()

    @property
    def warm_s(self) -> float | None:
        """Seconds from the beginning to the cut."""
        return None if self.cut_at is None else self.cut_at - self.begun_at

    @property
    def gap_s(self) -> float | None:
        """Seconds from the last token before the cut to the first token after it."""
        return None if self.left_at is None or self.arrived_at is None else self.arrived_at - self.left_at


@dataclass
class MigrationRecord:
    """The migrations of one request: the one in progress, and what is remembered of those that have ended."""

    current: MigrationState | None = None
    times: int = 0
    """Number of times that the request was cut over to another worker."""
    stayed: int = 0
    """Migrations in a row that left the request where it was."""
    not_before: float = 0.0
    """When the request may migrate again without an order, after such a migration."""
    migrated_at: float | None = None
    """When the request was last cut over to another worker."""
    refused_by: str | None = None
    """Lease of the last migration's destination, if the request stayed where it was."""

    def begin(self, state: MigrationState) -> None:
        """Note that a migration begins."""
        self.current = state

    def end(self, state: MigrationState, now: float, *, stayed: bool) -> None:
        """Note that the current migration has ended. `stayed`: the request is where it was."""
        self.current = None
        self.stayed = self.stayed + 1 if stayed else 0
        self.not_before = now + again_after_s(self.stayed)
        self.refused_by = state.destination if stayed else None
        self.migrated_at = state.cut_at or self.migrated_at
        self.times += state.cut_at is not None

    def accept(self, now: float) -> None:
        """Note that tokens of the request were accepted."""
        if self.current is not None:
            self.current.accept(now)

    def wake(self) -> None:
        """Have the current migration look at the request: it has ended, or has lost a worker."""
        if self.current is not None:
            self.current.changed.set()


# Counts how the migrations of a frontend end, and how long their gaps are.

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
            tuple(
                EndedMigrations(reason, outcome, number) for (outcome, reason), number in sorted(self.outcomes.items())
            ),
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
