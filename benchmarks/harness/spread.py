"""Medians, quantiles and their uncertainty. Pure: the random numbers are seeded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE, RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds it with `CONFIDENCE`."""

    low: float
    estimate: float
    high: float

    def shown(self, digits: int = 2) -> str:
        return f"{self.estimate:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def median(values: Sequence[float]) -> float:
    """The value in the middle. Raises ValueError without values."""
    return float(statistics.median(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile at `share` (0 to 1), interpolated. Raises ValueError without values."""
    if not values:
        raise ValueError("no values, no quantile")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def bootstrap(values: Sequence[float], estimator: Callable[[Sequence[float]], float] = median) -> Interval:
    """Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).

    For paired measurements pass one value a pair (a ratio, a difference): that keeps the pairs together. Raises
    ValueError without values.

    Few values promise more than they hold: the median of n lies outside their whole range with probability
    2 ** (1 - n), so that the interval of 3 rounds holds it in 75 % of all cases at best, that of 4 in 88 %.
    """
    if not values:
        raise ValueError("no values, no estimate")
    draw = random.Random(0)
    estimates = [estimator(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return Interval(quantile(estimates, tail), estimator(values), quantile(estimates, 1 - tail))


def ratio(ours: Iterable[float | None], beside: Iterable[float | None]) -> str:
    """The ratio of paired measurements with its interval, as text; "-" without a pair of which both are known."""
    pairs = zip(ours, beside, strict=False)
    ratios = [mine / other for mine, other in pairs if mine is not None and other]
    return bootstrap(ratios).shown() if ratios else "-"
