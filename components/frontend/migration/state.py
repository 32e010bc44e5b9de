"""A migration in progress, and what a request's earlier migrations mean for its next one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

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
