"""The limits of keys: so many a minute, at an even rate, with a minute's worth at once for who has waited. Pure.

The generic cell rate algorithm: each key has, for each limit, one number, the time at which all that it has taken would
be paid for at its rate. What would bring that time further ahead than a minute is refused. So in any t seconds a key
gets at most its limit, and t / 60 of it more. Times are of one clock that never goes back, in seconds.
"""

from __future__ import annotations

import math

import msgspec

WINDOW_S = 60.0

_MOST_AHEAD_S = 3600.0
"""A time further ahead than that is no debt, but of another clock."""

_FULL_S = WINDOW_S * (1 + 1e-9)
"""How far ahead what is taken may bring the number. A billionth of a minute is the error of the arithmetic."""


class Margin(msgspec.Struct, frozen=True):
    """How a key stands with one of its limits. `remaining`: how many could be taken now. `reset_s`: until a whole
    minute's worth can be."""

    remaining: int
    reset_s: float


def take(paid_at: float, now: float, amount: int, per_minute: int, *, forced: bool = False) -> float | None:
    """Return the number to keep after an amount is taken; None: the limit does not allow it. `forced`: it is taken in
    any case, since it has been used already."""
    # `_sane` is written out, and called for what is rare: this is done for each request.
    before = paid_at if now < paid_at <= now + _MOST_AHEAD_S else _sane(paid_at, now)
    after = before + amount * WINDOW_S / per_minute
    return after if forced or after - now <= _FULL_S else None


def wait_s(paid_at: float, now: float, amount: int, per_minute: int) -> float:
    """Return the time until an amount can be taken; infinite: it never can be."""
    if amount > per_minute:
        return math.inf
    return max(0.0, _sane(paid_at, now) + amount * WINDOW_S / per_minute - now - WINDOW_S)


def margin_of(paid_at: float, now: float, per_minute: int) -> Margin:
    """What could be taken now."""
    ahead_s = paid_at - now
    if not 0.0 < ahead_s <= _MOST_AHEAD_S:
        ahead_s = 0.0 if ahead_s <= 0.0 else _sane(paid_at, now) - now
    remaining = int((WINDOW_S - ahead_s) * per_minute / WINDOW_S + 1e-6)
    return Margin(remaining if remaining > 0 else 0, ahead_s)


def give_back(paid_at: float, now: float, amount: int, per_minute: int, taken_until: float) -> float:
    """Return the number to keep after an amount is given back that was taken and not used. `taken_until`: the number
    right after it was taken. What the key's rate has paid for meanwhile is not given twice."""
    back_s = amount * WINDOW_S / per_minute
    if back_s > taken_until - now:
        back_s = taken_until - now
    return paid_at - back_s if back_s > 0.0 else paid_at


def _sane(paid_at: float, now: float) -> float:
    """The number as one that can be: not in the past, and no later than any debt reaches."""
    if not paid_at > now:
        return now
    return paid_at if paid_at <= now + _MOST_AHEAD_S else now + WINDOW_S
