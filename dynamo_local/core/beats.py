"""Beats: the common times at which the loops of all processes of a machine wake up. Pure.

All processes share a clock. A process that wakes up at a beat finds what the others have sent at the same time, and is
not woken up once for each of them.
"""

from __future__ import annotations

BEAT_S = 0.5
"""Interval at which a process publishes its presence, in seconds."""

QUIET_BEAT_S = 2.0
"""The interval while nothing about the process changes, because each presence wakes up all others. The end of such a
process is noticed later by the difference. A multiple of BEAT_S."""

QUIET_AFTER_S = 5.0
"""Time without a change after which a process is quiet."""


def until_beat(now: float, interval_s: float) -> float:
    """Seconds until the next multiple of the interval, by CLOCK_MONOTONIC. If that is very near, the one after it is
    meant: the timer for it may have gone off a little early."""
    left_s = interval_s - now % interval_s
    return left_s if left_s > interval_s / 10 else left_s + interval_s
