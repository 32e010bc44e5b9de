"""Arrival times of requests, as point processes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.errors import UsageError
from dynamo_local.load.results.quantities import parse_duration, parse_number, shown_duration

SYNTAX = "5, constant:5, gamma:5:2.5 (rate and coefficient of variation) or sine:1-10:60s (rates and period)"


class Arrivals(Protocol):
    """An infinite arrival process."""

    def times(self, draw: random.Random) -> Iterator[float]:
        """Yield arrival times in seconds since the start, ascending and without end."""
        ...


@dataclass(frozen=True)
class Constant:
    """An arrival every 1 / rate seconds, the first at 0."""

    rate: float

    def times(self, draw: random.Random) -> Iterator[float]:
        index = 0
        while True:
            yield index / self.rate  # not a sum of gaps, which would drift
            index += 1

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s at constant distances"


@dataclass(frozen=True)
class Gamma:
    """A renewal process whose gaps have mean 1 / rate and the coefficient of variation `cv`.

    With cv 1 it is the Poisson process (independent users); above 1 requests come in bursts, below 1 more evenly.
    """

    rate: float
    cv: float = 1.0

    def times(self, draw: random.Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        scale = 1 / (shape * self.rate)
        at_s = 0.0
        while True:
            at_s += draw.gammavariate(shape, scale)
            yield at_s

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s, " + ("Poisson" if self.cv == 1 else f"Gamma with CV {self.cv:g}")


@dataclass(frozen=True)
class Sinusoid:
    """A Poisson process whose rate is a sine between two values, rising from their mean at the start.

    Drawn by thinning (Lewis and Shedler, Simulation of nonhomogeneous Poisson processes by thinning, 1979).
    """

    low: float
    high: float
    period_s: float

    def rate_at(self, at_s: float) -> float:
        middle, swing = (self.high + self.low) / 2, (self.high - self.low) / 2
        return middle + swing * math.sin(2 * math.pi * at_s / self.period_s)

    def times(self, draw: random.Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            at_s += draw.expovariate(self.high)
            if draw.random() * self.high < self.rate_at(at_s):
                yield at_s

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} requests/s, Poisson, in a sine of {shown_duration(self.period_s)}"


def parse_arrivals(text: str) -> Arrivals:
    """Parse a rate such as `5`, `constant:5` or `sine:1-10:60s`. Raises UsageError."""
    kind, *rest = text.split(":") if ":" in text else ("poisson", text)
    match kind, rest:
        case "poisson", [rate]:
            return Gamma(_rate(rate))
        case "constant", [rate]:
            return Constant(_rate(rate))
        case "gamma", [rate, cv]:
            return Gamma(_rate(rate), parse_number(cv, "coefficient of variation", above=0))
        case "sine", [rates, period]:
            low, _, high = rates.partition("-")
            swing = Sinusoid(parse_number(low, "lower rate", at_least=0), _rate(high), parse_duration(period))
            if swing.low > swing.high:
                raise UsageError(f"the lower rate of {text!r} is above the higher one")
            return swing
    raise UsageError(f"{text!r} is not a rate", f"write {SYNTAX}")


def _rate(text: str) -> float:
    return parse_number(text, "rate", above=0)
