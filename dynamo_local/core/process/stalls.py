"""How long an engine has made no step though it could have: a starved engine is not a hung one. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_STARVED = 0.5
"""An engine whose threads have waited for a core for so much of the time could do nothing in it."""
_LASTS_S = 3.0
"""An engine counts as starved for so long after such a look: once it had a core for a moment, it waits again unseen."""


class Verdict(enum.Enum):
    """What to make of an engine with requests to work on."""

    WELL = "well"
    STARVED = "starved"
    HUNG = "hung"


@dataclass
class StallClock:
    """Counts the time, since an engine's last step, in which it had a core or wanted none.

    `longest_look_s`: a look counts for no more. Who looks later has been kept from it, as the engine may have been.
    """

    limit_s: float
    longest_look_s: float
    _looked_at: float = float("-inf")
    _waited_s: float = 0.0
    _able_s: float = 0.0
    _starved_until: float = float("-inf")

    def look(self, now: float, stepped_at: float, waited_s: float) -> Verdict:
        """`stepped_at`: of the last step, or when there was something to do first. `waited_s`: for how long its threads
        have waited for a core, ever."""
        first = stepped_at >= self._looked_at
        passed_s = max(now - max(self._looked_at, stepped_at), 0.0)
        lately_s = waited_s - self._waited_s
        self._looked_at, self._waited_s = now, waited_s
        if first:
            # What was waited before the step is not known apart.
            self._able_s = 0.0
        elif passed_s > 0 and lately_s >= _STARVED * passed_s:
            self._starved_until = now + _LASTS_S
        if now <= self._starved_until and not first:
            return Verdict.STARVED
        self._able_s += min(passed_s, self.longest_look_s)
        return Verdict.HUNG if self._able_s > self.limit_s else Verdict.WELL
