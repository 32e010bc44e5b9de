"""The limits of keys: so many a minute, at an even rate, with a minute's worth at once for who has waited. Pure.

The generic cell rate algorithm: each key has, for each limit, one number, the time at which all that it has taken would
be paid for at its rate. What would bring that time further ahead than a minute is refused. So in any t seconds a key
gets at most its limit, and t / 60 of it more. Times are of one clock that never goes back, in seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WINDOW_S = 60.0

_MOST_AHEAD_S = 3600.0
"""A time further ahead than that is no debt, but of another clock."""


class Taken(NamedTuple):
    """What became of an attempt to take. `paid_at`: the number to keep. `remaining`: how many could be taken now.
    `reset_s`: until a whole minute's worth can be. `retry_s`: until what was refused can be taken; 0: it was taken;
    infinite: it never can be."""

    paid_at: float
    remaining: int
    reset_s: float
    retry_s: float = 0.0

    @property
    def granted(self) -> bool:
        """Whether it was taken."""
        return self.retry_s == 0.0


def take(paid_at: float, now: float, amount: int, per_minute: int, *, forced: bool = False) -> Taken:
    """Take an amount if the limit allows it; `forced`: in any case, since it has been used already."""
    # Written out in place of _sane: this is done for each request.
    before = paid_at if now < paid_at <= now + _MOST_AHEAD_S else _sane(paid_at, now)
    after = before + amount * WINDOW_S / per_minute
    over_s = after - now - WINDOW_S
    # A billionth of a minute is the error of the arithmetic, not of the client.
    if forced or over_s <= 1e-9 * WINDOW_S:
        ahead_s = after - now
        return Taken(after, max(0, int((WINDOW_S - ahead_s) * per_minute / WINDOW_S + 1e-6)), ahead_s)
    seen = standing(before, now, per_minute)
    return Taken(before, seen.remaining, seen.reset_s, math.inf if amount > per_minute else over_s)


def standing(paid_at: float, now: float, per_minute: int) -> Taken:
    """What could be taken now."""
    at = _sane(paid_at, now)
    ahead_s = at - now
    remaining = max(0, math.floor((WINDOW_S - ahead_s) * per_minute / WINDOW_S + 1e-6))
    return Taken(at, remaining, ahead_s)


def give_back(paid_at: float, now: float, amount: int, per_minute: int, taken_until: float) -> float:
    """Return the number to keep after an amount is given back that was taken and not used. `taken_until`: the number
    right after it was taken. What the key's rate has paid for meanwhile is not given twice."""
    back_s = min(amount * WINDOW_S / per_minute, taken_until - now)
    return paid_at - max(0.0, back_s)


def _sane(paid_at: float, now: float) -> float:
    """The number as one that can be: not in the past, and no later than any debt reaches."""
    if not paid_at > now:
        return now
    return paid_at if paid_at <= now + _MOST_AHEAD_S else now + WINDOW_S
