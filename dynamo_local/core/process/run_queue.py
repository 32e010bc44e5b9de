"""Computes how long threads ran and waited for a core. Pure; `state/machine/threads.py` reads the kernel's counters.

The kernel counts a thread's waiting only when it ends. So a thread that is runnable, and has neither run nor waited
since the last reading, has waited all the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadTimes:
    """A thread's counters since its start, in seconds. `core`: the core on which it runs, or ran last."""

    ran_s: float
    waited_s: float
    runnable: bool
    core: int


@dataclass(frozen=True)
class Shares:
    """The sums over several threads between two readings, in seconds. `ran_s` is by core."""

    seconds: float
    waited_s: float
    ran_s: Mapping[int, float]


def waited_between(before: ThreadTimes, after: ThreadTimes, seconds: float) -> float:
    """The time for which the thread was runnable without a core, between two readings that are `seconds` apart."""
    waited_s, ran_s = after.waited_s - before.waited_s, after.ran_s - before.ran_s
    if waited_s <= 0 and ran_s <= 0:
        return seconds if before.runnable and after.runnable else 0.0
    return min(max(waited_s, 0.0), seconds)


def shares_between(before: Mapping[int, ThreadTimes], after: Mapping[int, ThreadTimes], seconds: float) -> Shares:
    """Sum over threads, by id, between two readings. A thread that only the later one has began in between."""
    ran: dict[int, float] = {}
    waited_s = 0.0
    for thread, new in after.items():
        old = before.get(thread, ThreadTimes(0.0, 0.0, False, new.core))
        waited_s += waited_between(old, new, seconds)
        ran[new.core] = ran.get(new.core, 0.0) + min(max(new.ran_s - old.ran_s, 0.0), seconds)
    return Shares(seconds, waited_s, ran)
