"""A move under way, as the request that is moved carries it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass
class MigrationState:
    """`destination` is a lease; times are CLOCK_MONOTONIC."""

    destination: str
    reason: str
    """Why it is moved: one word, fit to be counted by."""
    cold: bool = False
    """Without its KV."""
    floor: float | None = None
    """Only if its destination stays so free (core/fleet/freeness.py)."""
    unanswered: bool = False
    """The destination was asked, and did not say anything."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """The request's log is not what it was."""
    begun_at: float = field(default_factory=time.monotonic)
    cut_at: float | None = None
    left_at: float | None = None
    """When the last token before the cut was accepted."""
    arrived_at: float | None = None
    """When the first token after it was."""

    def note_token(self, now: float) -> None:
        """Tokens were accepted."""
        if self.cut_at is not None and self.arrived_at is None:
            self.arrived_at = now
        self.changed.set()

    @property
    def warm_s(self) -> float | None:
        """From the beginning to the cut."""
        return None if self.cut_at is None else self.cut_at - self.begun_at

    @property
    def gap_s(self) -> float | None:
        """From the last token before the cut to the first one after it."""
        return None if self.left_at is None or self.arrived_at is None else self.arrived_at - self.left_at
