"""Distributions of the lengths of prompts and answers."""

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
        """Maximum length."""
        ...

    def draw(self, draw: random.Random) -> int: ...


@dataclass(frozen=True)
class Uniform:
    """Equally frequent lengths from `shortest` to `longest`."""

    shortest: int
    longest: int

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.shortest, self.longest)

    def __str__(self) -> str:
        return str(self.longest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"


@dataclass(frozen=True)
class PowerLaw:
    """A bounded power law with density proportional to x ** -exponent: most lengths are short, few are very long.

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
    """Parse a length such as `512`, `100-2000` or `power:2.0:16-4000`. `what` names it in errors. Raises UsageError."""
    match text.split(":"):
        case [bounds]:
            return Uniform(*_bounds(bounds, what))
        case ["power", exponent, bounds]:
            power = parse_number(exponent, f"exponent of {what}", above=0)
            if power > 20:
                raise UsageError(f"exponent of {what} must be at most 20, not {exponent}")
            return PowerLaw(power, *_bounds(bounds, what))
    raise UsageError(f"{what}: {text!r} is not a length", f"write {SYNTAX}")


def _bounds(text: str, what: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    shortest = parse_count(low, what)
    longest = parse_count(high, what) if dash else shortest
    if shortest > longest:
        raise UsageError(f"{what}: {text!r} begins above its end")
    return shortest, longest
