"""What the supervisor tells the person who started it, as plain lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Report(Protocol):
    """Where lines go. Neither method raises, whatever became of the terminal."""

    def step(self, text: str) -> None:
        """Something happened on the way; shown with the time passed."""
        ...

    def say(self, text: str) -> None:
        """A line of its own."""
        ...


def quote(report: Report, lines: Iterable[str]) -> None:
    """Show lines of a log as such."""
    for line in lines:
        report.say(f"    | {line}")
