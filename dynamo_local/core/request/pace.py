"""How fast the tokens of a request come. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

_LOOKED_AT = 33


class Pace:
    """Of one request, by the times at which its last tokens were accepted."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_LOOKED_AT)

    def note(self, now: float) -> None:
        """Tokens were accepted."""
        self._times.append(now)

    @property
    def last(self) -> float | None:
        """When the last ones were."""
        return self._times[-1] if self._times else None

    @property
    def step_s(self) -> float | None:
        """Median time from one acceptance to the next. None: there was only one, or none."""
        steps = [later - earlier for earlier, later in pairwise(self._times)]
        return statistics.median(steps) if steps else None
