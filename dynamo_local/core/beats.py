"""When loops of many processes wake up: together. Pure.

All processes of a machine share a clock. Who is awake for one thing does the others along with it, finds what the
others have sent, and is not woken up for each of them.
"""

from __future__ import annotations

BEAT_S = 0.5
"""A process tells of itself so often."""

QUIET_BEAT_S = 2.0
"""And so often while nothing about it changes: each word wakes up all others. Who falls silent then is missed later by
the difference. A multiple of BEAT_S."""

QUIET_AFTER_S = 5.0
"""Without a change."""


def until_beat(now: float, interval_s: float) -> float:
    """Seconds until the next multiple of the interval, by CLOCK_MONOTONIC; until the one after it, if that is all but
    there: a timer may go off a little early."""
    left_s = interval_s - now % interval_s
    return left_s if left_s > interval_s / 10 else left_s + interval_s
