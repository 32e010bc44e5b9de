"""How fast counters grow. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
"""Rates are means over so long: counts come every half second, and are to be read by people."""

_LEAST_S = 0.9
"""Of less time no rate is told."""


Counter = tuple[str, str]
"""Whose, and which."""


class Rates:
    """Of counters that are read now and then. Times are CLOCK_MONOTONIC, in seconds, and never go back."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: dict[Counter, deque[tuple[float, float]]] = {}

    def note(self, counter: Counter, value: float, now: float) -> None:
        """A counter has this value. One that has become less has begun anew."""
        readings = self._readings.setdefault(counter, deque())
        if readings and value < readings[-1][1]:
            readings.clear()
        readings.append((now, value))
        # One that is older than the window stays: it says where the window begins.
        while len(readings) > 1 and readings[1][0] <= now - self._window_s:
            readings.popleft()

    def growth(self, counter: Counter, now: float) -> float | None:
        """By how much it has grown within the window. None: it is not known long enough."""
        readings = self._readings.get(counter)
        if not readings or now - readings[0][0] < _LEAST_S:
            return None
        before = [value for at, value in readings if at <= now - self._window_s]
        return readings[-1][1] - (before[-1] if before else readings[0][1])

    def rate(self, counter: Counter, now: float) -> float | None:
        """The same for one second."""
        grown = self.growth(counter, now)
        if grown is None:
            return None
        return grown / min(self._window_s, now - self._readings[counter][0][0])

    def forget(self, owner: str) -> None:
        """Forget the counters of one owner."""
        for key in [key for key in self._readings if key[0] == owner]:
            del self._readings[key]
