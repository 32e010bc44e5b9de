"""The option --since of commands that show what was written down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def since_option(function: _F) -> _F:
    """Add the option --since, which `cutoff_of` reads."""
    return click.option("--since", metavar="TIME", help="Show what is newer than TIME, e.g. 90s, 10m or 1h.")(function)


def cutoff_of(since: str | None, clock: Callable[[], float] = time.time) -> float | None:
    """Return the Unix time before which nothing is to be shown, in seconds; None without --since. Raises UsageError."""
    from dynamo_local.load.results.quantities import parse_duration

    return None if since is None else clock() - parse_duration(since)
