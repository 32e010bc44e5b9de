"""Quantiles, and confidence intervals of ratios of quantiles."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

RESAMPLES = 2000
CONFIDENCE = 0.95
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Spread(msgspec.Struct, frozen=True):
    """Mean, quantiles and maximum of a set of values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and its confidence interval at level `CONFIDENCE`."""

    low: float
    estimate: float
    high: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share` (0 to 1) of ascending values, interpolated. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values, no quantile")
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of the values; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    # fsum rounds once, but the quotient may leave the range of the values by the last bit.
    within = min(max(mean, ordered[0]), ordered[-1])
    quantiles = {name: quantile(ordered, share) for name, share in SHARES.items()}
    return Spread(count=len(ordered), mean=within, max=ordered[-1], **quantiles)


def resampled(ordered: Sequence[float], share: float, draw: random.Random) -> float:
    """Return a bootstrap replicate of a quantile: the quantile of a resample of the values with replacement.

    No resample is drawn: the k-th smallest of n uniform numbers has the distribution Beta(k, n + 1 - k) (David and
    Nagaraja, Order Statistics, section 2.3), and so has the relative rank of the k-th smallest value of a resample.
    """
    size = len(ordered)
    place = max(1, math.ceil(share * size))
    rank = draw.betavariate(place, size + 1 - place)
    return ordered[min(int(rank * size), size - 1)]


def ratio_of_quantiles(
    first: Sequence[float], second: Sequence[float], share: float, draw: random.Random
) -> Interval | None:
    """Return the ratio of the second sample's quantile to the first's, with a percentile bootstrap interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13). None if a sample is empty, or if quantiles of the
    first are 0.

    The values are taken as independent. Latencies of requests that queued behind each other are not: then the interval
    is too narrow.
    """
    first, second = sorted(first), sorted(second)
    if not first or not second or not quantile(first, share) > 0:
        return None
    pairs = ((resampled(second, share, draw), resampled(first, share, draw)) for _ in range(RESAMPLES))
    ratios = sorted(above / below if below > 0 else math.inf for above, below in pairs)
    tail = (1 - CONFIDENCE) / 2
    estimate = quantile(second, share) / quantile(first, share)
    # Whole ranks only: interpolation towards infinity gives NaN.
    return Interval(ratios[int(tail * (RESAMPLES - 1))], estimate, ratios[math.ceil((1 - tail) * (RESAMPLES - 1))])
