"""The lines that the supervisor shows to the person who started it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Report(Protocol):
    """Shows lines, on a terminal or in a log. Neither method raises, even if the terminal is gone."""

    def step(self, text: str) -> None:
        """Show a step of the work, with the time passed."""
        ...

    def say(self, text: str) -> None:
        """Show a line as it is."""
        ...


def quote(report: Report, lines: Iterable[str]) -> None:
    """Show lines that are quoted from a log."""
    for line in lines:
        report.say(f"    | {line}")
