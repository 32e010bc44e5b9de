"""A report that remembers, for tests."""

from __future__ import annotations


class RecordingReport:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def pending(self, text: str) -> None:
        self.lines.append(text)
