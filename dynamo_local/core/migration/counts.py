"""The moves of all frontends together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dynamo_local.core.messages.presence import EndedMigrations, MigrationCounts, Presence


def moves_of(members: Iterable[Presence]) -> MigrationCounts | None:
    """What those of them that move requests have counted; None if nobody tells. The gap is the longest last one."""
    told = [presence.counts.migrations for presence in members if presence.counts is not None]
    known = [moves for moves in told if moves is not None]
    if not known:
        return None
    ended: Counter[tuple[str, str]] = Counter()
    for moves in known:
        for each in moves.ended:
            ended[each.reason, each.outcome] += each.number
    longest = max(known, key=lambda moves: moves.gap_s or 0.0)
    return MigrationCounts(
        tuple(EndedMigrations(*name, number) for name, number in sorted(ended.items())),
        sum(moves.pulled_bytes for moves in known),
        longest.gap_s,
        longest.gap_steps,
    )
