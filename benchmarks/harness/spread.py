"""Medians, quantiles and their uncertainty. Pure: the random numbers are seeded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_local.load.results import quantiles
from dynamo_local.load.results.quantiles import CONFIDENCE, RESAMPLES


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
    """As `dynamo load` computes it, of values in any order. Raises ValueError without values."""
    return quantiles.quantile(sorted(values), share)


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
