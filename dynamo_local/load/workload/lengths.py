"""How long prompts and answers are: distributions of whole numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.errors import UsageError
from dynamo_local.load.results.quantities import parse_count, parse_number

SYNTAX = "512, 100-2000 (evenly) or power:2.0:16-4000 (n tokens as often as n ** -2.0)"


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def longest(self) -> int:
        """No draw is above it."""
        ...

    def draw(self, draw: random.Random) -> int: ...


@dataclass(frozen=True)
class Uniform:
    """Every length from `shortest` to `longest` as often."""

    shortest: int
    longest: int

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.shortest, self.longest)

    def __str__(self) -> str:
        return str(self.longest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"


@dataclass(frozen=True)
class PowerLaw:
    """A bounded power law: most are short, few are very long. The density of x is proportional to x ** -exponent.

    Drawn on the real line from `shortest` to `longest` + 1 by inverting the distribution function, and rounded down.
    """

    exponent: float
    shortest: int
    longest: int

    def draw(self, draw: random.Random) -> int:
        low, high, share = float(self.shortest), self.longest + 1.0, draw.random()
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            value = low * (high / low) ** share
        else:
            # Relative to `low`, so that large exponents do not underflow.
            value = low * (1 + share * math.expm1(power * math.log(high / low))) ** (1 / power)
        return min(max(int(value), self.shortest), self.longest)

    def __str__(self) -> str:
        return f"power:{self.exponent:g}:{self.shortest}-{self.longest}"


def parse_lengths(text: str, what: str) -> Lengths:
    """Raises UsageError."""
    match text.split(":"):
        case [bounds]:
            return Uniform(*_bounds(bounds, what))
        case ["power", exponent, bounds]:
            power = parse_number(exponent, f"exponent of {what}", above=0)
            if power > 20:
                raise UsageError(f"exponent of {what} must be at most 20, not {exponent}")
            return PowerLaw(power, *_bounds(bounds, what))
    raise UsageError(f"{what}: {text!r} is no length", f"write {SYNTAX}")


def _bounds(text: str, what: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    shortest = parse_count(low, what)
    longest = parse_count(high, what) if dash else shortest
    if shortest > longest:
        raise UsageError(f"{what}: {text!r} begins above its end")
    return shortest, longest
