"""The rate at which the tokens of a request come. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

_LOOKED_AT = 33
"""Number of times that are kept: the median is of up to 32 intervals."""


class Pace:
    """The pace of one request, by the times at which its last tokens were accepted (CLOCK_MONOTONIC, s)."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_LOOKED_AT)

    def note(self, now: float) -> None:
        """Note that tokens were accepted."""
        self._times.append(now)

    @property
    def last(self) -> float | None:
        """When tokens were last accepted; None if none were."""
        return self._times[-1] if self._times else None

    @property
    def step_s(self) -> float | None:
        """Median seconds from one acceptance to the next; None if there was at most one."""
        steps = [later - earlier for earlier, later in pairwise(self._times)]
        return statistics.median(steps) if steps else None
