"""The migrations of all frontends together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dynamo_local.core.messages.presence import Ended, MigrationCounts, Presence


def migrations_of(members: Iterable[Presence]) -> MigrationCounts | None:
    """Return the sum of what the frontends among the members have counted; None if none has reported. The gap is the
    longest of their last gaps."""
    reported = [presence.counts.moves for presence in members if presence.counts is not None]
    known = [counts for counts in reported if counts is not None]
    if not known:
        return None
    ended: Counter[tuple[str, str]] = Counter()
    for counts in known:
        for each in counts.ended:
            ended[each.reason, each.outcome] += each.moves
    longest = max(known, key=lambda counts: counts.gap_s or 0.0)
    return MigrationCounts(
        tuple(Ended(*name, number) for name, number in sorted(ended.items())),
        sum(counts.pulled_bytes for counts in known),
        longest.gap_s,
        longest.gap_steps,
    )
