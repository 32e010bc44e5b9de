"""Tells a hung engine from a starved one, by the time in which it could have made a step and did not. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_STARVED = 0.5
"""Share of the time: an engine whose threads have waited for a core for longer could not work in it."""

_LASTS_S = 3.0
"""An engine counts as starved for so long after it was seen starved. After a moment on a core it waits again, and the
kernel counts that only when the waiting ends."""


class Verdict(enum.Enum):
    """The state of an engine that has requests to work on."""

    WELL = "well"
    STARVED = "starved"
    HUNG = "hung"


@dataclass
class StallClock:
    """Counts the time, since an engine's last step, in which it had a core or wanted none.

    `longest_look_s`: the longest time that one look may add. A look that comes later was itself delayed, and whatever
    delayed it may have delayed the engine.
    """

    limit_s: float
    longest_look_s: float
    _looked_at: float = float("-inf")
    _waited_s: float = 0.0
    _able_s: float = 0.0
    _starved_until: float = float("-inf")

    def look(self, now: float, stepped_at: float, waited_s: float) -> Verdict:
        """Judge the engine. `stepped_at`: time of its last step, or of its first request since it was idle. `waited_s`:
        how long its threads have waited for a core since they began."""
        first = stepped_at >= self._looked_at
        passed_s = max(now - max(self._looked_at, stepped_at), 0.0)
        lately_s = waited_s - self._waited_s
        self._looked_at, self._waited_s = now, waited_s
        if first:
            # `waited_s` also contains waiting before the step, so nothing is known about the time since.
            self._able_s = 0.0
        elif passed_s > 0 and lately_s >= _STARVED * passed_s:
            self._starved_until = now + _LASTS_S
        if now <= self._starved_until and not first:
            return Verdict.STARVED
        self._able_s += min(passed_s, self.longest_look_s)
        return Verdict.HUNG if self._able_s > self.limit_s else Verdict.WELL
