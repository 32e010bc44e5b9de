"""Computes rates of counters. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
"""Time over which rates are means, in seconds. Shorter means change too fast to be read."""

_LEAST_S = 0.9
"""Minimum time between the first and the last reading for a rate, in seconds."""


Counter = tuple[str, str]
"""Owner and name of a counter."""


class Rates:
    """Readings of counters. Times are CLOCK_MONOTONIC, in seconds, and never decrease."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: dict[Counter, deque[tuple[float, float]]] = {}

    def note(self, counter: Counter, value: float, now: float) -> None:
        """Add a reading. A smaller value than before means that the counter has restarted: older readings go."""
        readings = self._readings.setdefault(counter, deque())
        if readings and value < readings[-1][1]:
            readings.clear()
        readings.append((now, value))
        # One reading older than the window stays: the growth within the window is counted from it.
        while len(readings) > 1 and readings[1][0] <= now - self._window_s:
            readings.popleft()

    def growth(self, counter: Counter, now: float) -> float | None:
        """Return the counter's growth within the window; None without readings over enough time."""
        readings = self._readings.get(counter)
        if not readings or now - readings[0][0] < _LEAST_S:
            return None
        before = [value for at, value in readings if at <= now - self._window_s]
        return readings[-1][1] - (before[-1] if before else readings[0][1])

    def rate(self, counter: Counter, now: float) -> float | None:
        """Return the counter's growth per second; None without readings over enough time."""
        grown = self.growth(counter, now)
        if grown is None:
            return None
        return grown / min(self._window_s, now - self._readings[counter][0][0])

    def forget(self, owner: str) -> None:
        """Forget the counters of one owner."""
        for key in [key for key in self._readings if key[0] == owner]:
            del self._readings[key]
