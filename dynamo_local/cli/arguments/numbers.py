"""Types of numbers that options take."""

from __future__ import annotations

import math

import click


class FiniteRange(click.FloatRange):
    """A range of decimal numbers without nan and inf. No comparison refuses nan, and JSON has neither of the two."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's type does."""
        number = super().convert(value, param, ctx)  # type: ignore[arg-type]  # typed more narrowly than click calls it
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return float(number)
