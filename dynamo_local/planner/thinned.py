"""Curves without the points that say nothing: of a stretch with one value, its two ends are kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KEPT_EVERY_S = 60.0
"""A value that stays is told again after so long, so that a curve of now reaches to now."""


@dataclass
class _Curve:
    """`told_at`: of the last point that was kept. `seen_at`: of the last one that there was."""

    value: float
    told_at: float
    seen_at: float


class Thinned:
    """The curves of one recording. Between the points that are kept, straight lines give the others back."""

    def __init__(self, kept_every_s: float = KEPT_EVERY_S) -> None:
        self._kept_every_s = kept_every_s
        self._curves: dict[str, _Curve] = {}

    def take(self, at: float, numbers: Mapping[str, float]) -> list[tuple[float, dict[str, float]]]:
        """The points to be kept now that there are these numbers, as (time, numbers), in order of time.

        A curve without a number now is at an end. Times are never before those of the last call.
        """
        ends = {name: curve for name, curve in self._curves.items() if numbers.get(name) != curve.value}
        points = self._ends(ends)
        for name in ends.keys() - numbers.keys():
            del self._curves[name]
        if told := {name: number for name, number in numbers.items() if self._tell(name, number, at)}:
            points.append((at, told))
        return points

    def finish(self) -> list[tuple[float, dict[str, float]]]:
        """The points that are left to be kept when no more numbers come."""
        points = self._ends(self._curves)
        self._curves = {}
        return points

    def _ends(self, curves: Mapping[str, _Curve]) -> list[tuple[float, dict[str, float]]]:
        points: dict[float, dict[str, float]] = {}
        for name, curve in curves.items():
            if curve.seen_at > curve.told_at:
                points.setdefault(curve.seen_at, {})[name] = curve.value
        return sorted(points.items())

    def _tell(self, name: str, number: float, at: float) -> bool:
        curve = self._curves.get(name)
        if curve is not None and curve.value == number and at - curve.told_at < self._kept_every_s:
            curve.seen_at = at
            return False
        self._curves[name] = _Curve(number, at, at)
        return True
