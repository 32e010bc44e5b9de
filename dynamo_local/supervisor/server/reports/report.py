"""The lines that the supervisor shows to the person who started it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Report(Protocol):
    """Shows lines, on a terminal or in a log. Neither method raises, even if the terminal is gone."""

    def step(self, text: str) -> None:
        """Show a step of the work, with the time passed."""

    def say(self, text: str) -> None:
        """Show a line as it is."""

    def pending(self, text: str) -> None:
        """Show what the work waits for, with the time passed. On a terminal it replaces the last such line."""


class ReportOnce:
    """Reports a lasting failure once, for a loop that meets it in each round."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last = ""

    def note(self, text: str) -> None:
        """Report the text unless it is the same as in the last call. An empty text reports nothing: the failure is
        over."""
        if text and text != self._last:
            self._report.step(text)
        self._last = text


def quote(report: Report, lines: Iterable[str]) -> None:
    """Show lines that are quoted from a log."""
    for line in lines:
        report.say(f"    | {line}")
