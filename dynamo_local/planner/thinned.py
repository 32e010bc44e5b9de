"""Drops redundant points of curves: of a stretch with a constant value, its two ends are kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KEPT_EVERY_S = 60.0
"""Period after which a constant value is written again, in seconds, so that live curves reach the present."""


@dataclass
class _Curve:
    """The last value of a curve. `kept_at`: time of its last kept point. `seen_at`: time of its last point."""

    value: float
    kept_at: float
    seen_at: float


class Thinned:
    """The curves of one recording. Straight lines between the kept points reproduce the dropped ones."""

    def __init__(self, kept_every_s: float = KEPT_EVERY_S) -> None:
        self._kept_every_s = kept_every_s
        self._curves: dict[str, _Curve] = {}

    def take(self, at: float, numbers: Mapping[str, float]) -> list[tuple[float, dict[str, float]]]:
        """Add the numbers of time `at`; return the points to keep, as (time, numbers), in order of time.

        A curve without a number ends. Times never decrease from call to call.
        """
        ends = {name: curve for name, curve in self._curves.items() if numbers.get(name) != curve.value}
        points = self._ends(ends)
        for name in ends.keys() - numbers.keys():
            del self._curves[name]
        if kept := {name: number for name, number in numbers.items() if self._keeps(name, number, at)}:
            points.append((at, kept))
        return points

    def finish(self) -> list[tuple[float, dict[str, float]]]:
        """End all curves; return the points that are still to be kept."""
        points = self._ends(self._curves)
        self._curves = {}
        return points

    def _ends(self, curves: Mapping[str, _Curve]) -> list[tuple[float, dict[str, float]]]:
        points: dict[float, dict[str, float]] = {}
        for name, curve in curves.items():
            if curve.seen_at > curve.kept_at:
                points.setdefault(curve.seen_at, {})[name] = curve.value
        return sorted(points.items())

    def _keeps(self, name: str, number: float, at: float) -> bool:
        curve = self._curves.get(name)
        if curve is not None and curve.value == number and at - curve.kept_at < self._kept_every_s:
            curve.seen_at = at
            return False
        self._curves[name] = _Curve(number, at, at)
        return True
