"""What is known of a graph at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dynamo_local.core.messages.planner import PlannerReport
from dynamo_local.core.messages.prefill import QueueLength
from dynamo_local.core.messages.presence import Presence


@dataclass(frozen=True)
class Snapshot:
    """A graph or a revision of an endpoint at one moment. `at` is CLOCK_MONOTONIC, in seconds. None: unknown, or there
    is no such part."""

    at: float
    members: tuple[Presence, ...] = ()
    routable: frozenset[str] = frozenset()
    """Leases of the processes that may be given work, in any role."""
    starts: Counter[str] = field(default_factory=Counter)
    """Number of processes of each watcher since the watch began."""
    queue: QueueLength | None = None
    planner: PlannerReport | None = None
    decisions: Counter[bool] = field(default_factory=Counter)
    """Number of the planner's decisions since the watch began, by whether they had outcomes."""
