"""Parses quantities of the command line, and formats them for the report."""

from __future__ import annotations

import math

from dynamo_local.core.errors import UsageError

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Parse a duration such as "90", "90s", "250ms", "5m", "1h" or "30d" into seconds. Raises UsageError."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :] or "s"
    if unit not in _UNITS_S:
        raise UsageError(f"{text!r} is not a duration", "write for example 90s, 250ms, 5m, 1h or 30d")
    return parse_number(number, "duration", above=0) * _UNITS_S[unit]


def parse_number(text: str, what: str, *, above: float | None = None, at_least: float | None = None) -> float:
    """Parse a finite number within the limits. `what` names it in errors. Raises UsageError."""
    try:
        value = float(text)
    except ValueError as error:
        raise UsageError(f"{what}: {text!r} is not a number") from error
    if not math.isfinite(value):
        raise UsageError(f"{what} must be finite, not {text}")
    if above is not None and value <= above:
        raise UsageError(f"{what} must be above {above:g}, not {text}")
    if at_least is not None and value < at_least:
        raise UsageError(f"{what} must be at least {at_least:g}, not {text}")
    return value


def parse_count(text: str, what: str) -> int:
    """Parse a whole number of at least 1. `what` names it in errors. Raises UsageError."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UsageError(f"{what} must be a whole number of at least 1, not {text!r}")
    return int(text)


def shown_duration(seconds: float) -> str:
    """Return the shortest text that `parse_duration` reads back."""
    if seconds < 1:
        return f"{seconds * 1e3:g}ms"
    return f"{seconds:g}s"
