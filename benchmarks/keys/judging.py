"""Whether the limits of a key held, by what its clients saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_MINUTE_S = 60.0


class Seen(NamedTuple):
    """A request that was answered: when it was sent, and when its first and last events came, in seconds."""

    sent_s: float
    first_s: float
    last_s: float


class Judged(msgspec.Struct, frozen=True):
    """`over`: most requests by which a stretch of time exceeds what limit and rate allow; below 0: none does.
    `over_at_once`: the same of requests at once. `use`: the largest part of a limit a minute that was used."""

    over: float
    over_at_once: int
    use: float


def judge(
    seen: Sequence[Seen],
    *,
    tokens: int,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    requests_at_once: int | None = None,
) -> Judged:
    """Judge the answered requests of a key, of so many tokens each."""
    limits = [
        limit
        for limit in (requests_per_minute, None if tokens_per_minute is None else tokens_per_minute / tokens)
        if limit is not None
    ]
    limit = min(limits, default=0.0)
    over, use = (_over(seen, limit), _use(seen, limit)) if limit else (0.0, 0.0)
    over_at_once = 0 if requests_at_once is None else most_at_once(seen) - requests_at_once
    return Judged(over, over_at_once, use)


def _over(seen: Sequence[Seen], limit: float) -> float:
    """For each stretch that begins with a sending and ends with a first event: how many lie in it, beyond what may."""
    most = -limit
    by_first = sorted(seen, key=lambda each: each.first_s)
    for begin in sorted(each.sent_s for each in seen):
        number = 0
        for each in by_first:
            if each.sent_s >= begin:
                number += 1
                most = max(most, number - limit * (1 + (each.first_s - begin) / _MINUTE_S))
    return most


def _use(seen: Sequence[Seen], limit: float) -> float:
    """The most first events within a minute, in parts of the limit."""
    firsts = sorted(each.first_s for each in seen)
    counts = (sum(1 for at in firsts if begin <= at < begin + _MINUTE_S) for begin in firsts)
    return max(counts, default=0) / limit


def most_at_once(seen: Sequence[Seen]) -> int:
    """The most requests that were certainly in flight at one moment."""
    changes = sorted([(each.first_s, 1) for each in seen] + [(each.last_s, -1) for each in seen])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
