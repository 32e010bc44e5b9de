"""A histogram for Prometheus. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by ascending upper bounds. Values above the last bound are counted, too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """Pairs of a bound and the number of values up to it; the last bound is "+Inf"."""
        found: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


def added_up(histograms: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all values that these have counted. At least one; their bounds are the same."""
    whole = Histogram(histograms[0]._bounds)
    for each in histograms:
        whole._counts = [a + b for a, b in zip(whole._counts, each._counts, strict=True)]
        whole.sum += each.sum
    return whole
