"""What all routers have counted together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_local.core.messages.presence import Counts, Presence


@dataclass(frozen=True)
class RoutingCounts:
    """Requests that got a worker, and that got none; tokens of the contexts of the former, those of them that were
    expected to be cached, and those that were to be pulled."""

    assigned: int
    unassigned: int
    tokens: int
    predicted_tokens: int
    pull_tokens: int


def routers_of(members: Iterable[Presence]) -> list[tuple[Presence, Counts]]:
    """Return the routers among the members that have reported, with what they have counted."""
    return [
        (each, each.counts) for each in members if each.counts is not None and each.counts.routed_tokens is not None
    ]


def routing_of(members: Iterable[Presence]) -> RoutingCounts | None:
    """Return the sum of what the routers among the members have counted; None if none has reported."""
    counts = [counts for _, counts in routers_of(members)]
    if not counts:
        return None
    return RoutingCounts(
        assigned=sum(each.assigned or 0 for each in counts),
        unassigned=sum(each.unassigned or 0 for each in counts),
        tokens=sum(each.routed_tokens or 0 for each in counts),
        predicted_tokens=sum(each.predicted_tokens or 0 for each in counts),
        pull_tokens=sum(each.pull_tokens or 0 for each in counts),
    )
