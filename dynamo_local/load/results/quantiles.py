"""Quantiles, and how sure the ratio of two of them is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

RESAMPLES = 2000
CONFIDENCE = 0.95
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Spread(msgspec.Struct, frozen=True):
    """How values are spread."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and the interval that holds it with `CONFIDENCE`."""

    low: float
    estimate: float
    high: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated. The values must be in order. Raises
    ValueError without values."""
    if not ordered:
        raise ValueError("no values, no quantile")
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> Spread | None:
    """None without values: nothing was measured, which is not 0."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    # fsum rounds once; its quotient may still fall out of the range by the last bit.
    within = min(max(mean, ordered[0]), ordered[-1])
    quantiles = {name: quantile(ordered, share) for name, share in SHARES.items()}
    return Spread(count=len(ordered), mean=within, max=ordered[-1], **quantiles)


def resampled(ordered: Sequence[float], share: float, draw: random.Random) -> float:
    """One bootstrap replicate of a quantile: what a resample of the values with replacement has there.

    Without the resample: the k-th of n uniform numbers in order is distributed as Beta(k, n + 1 - k) (David and
    Nagaraja, Order Statistics, section 2.3), and so is the rank of the value that a resample has in the k-th place.
    """
    size = len(ordered)
    place = max(1, math.ceil(share * size))
    rank = draw.betavariate(place, size + 1 - place)
    return ordered[min(int(rank * size), size - 1)]


def ratio_of_quantiles(
    first: Sequence[float], second: Sequence[float], share: float, draw: random.Random
) -> Interval | None:
    """The quantile of the second sample over that of the first, with a percentile bootstrap interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13). None if either has no values, or the first has zeros
    where it counts.

    The values count as independent. Latencies of requests that queued behind each other are not, quite: the interval
    is then too narrow.
    """
    first, second = sorted(first), sorted(second)
    if not first or not second or not quantile(first, share) > 0:
        return None
    pairs = ((resampled(second, share, draw), resampled(first, share, draw)) for _ in range(RESAMPLES))
    ratios = sorted(above / below if below > 0 else math.inf for above, below in pairs)
    tail = (1 - CONFIDENCE) / 2
    estimate = quantile(second, share) / quantile(first, share)
    # By whole ranks: interpolating towards infinity gives no number.
    return Interval(ratios[int(tail * (RESAMPLES - 1))], estimate, ratios[math.ceil((1 - tail) * (RESAMPLES - 1))])
