"""The highest demand within a window of time, and for how long it has been watched. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

GAP_S = 10.0
"""Time without a known demand, in seconds, after which the window begins anew: what came meanwhile is not known."""


@dataclass(frozen=True)
class Demand:
    """Demand as it was read, pull by pull. Times are CLOCK_MONOTONIC, in seconds.

    `peaks`: (time, number) of the readings that may still be the highest of a window, oldest and highest first.
    `now`: the last reading, None if it could not be made. `since`: time of the first reading without a later gap.
    `until`: time of the last reading.
    """

    peaks: tuple[tuple[float, float], ...] = ()
    now: float | None = None
    since: float | None = None
    until: float | None = None

    def read(self, at: float, number: float | None, window_s: float, gap_s: float = GAP_S) -> Demand:
        """Add a reading. Times never decrease. `gap_s`: as GAP_S, where pulls are rarer than that."""
        if number is None:
            return replace(self, now=None)
        higher = tuple(peak for peak in self.peaks if peak[1] > number and peak[0] >= at - window_s)
        watched = self.since is not None and self.until is not None and at - self.until <= gap_s
        return Demand((*higher, (at, number)), number, self.since if watched else at, at)

    @property
    def most(self) -> float | None:
        """The highest reading of the window that ends with the last one; None if that could not be made."""
        return None if self.now is None else self.peaks[0][1]

    @property
    def watched_s(self) -> float:
        """Time for which the demand is known without a gap, in seconds."""
        return 0.0 if self.since is None or self.until is None else self.until - self.since
