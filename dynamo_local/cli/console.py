"""Output of commands: tables, and the lines of a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as text, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows))
    return "\n".join(line.rstrip() for line in lines)


class Console:
    """A report (supervisor.server.report.Report) on standard output, or on standard error if `err`. Steps show the
    seconds since the console was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, err: bool = False) -> None:
        self._clock = clock
        self._err = err
        self._started = clock()

    def step(self, text: str) -> None:
        self.say(f"[{self._clock() - self._started:6.1f}s] {text}")

    def say(self, text: str) -> None:
        try:
            click.echo(text, err=self._err)
        except OSError:
            # The terminal or the reader of the pipe has gone. A server must still be able to end gracefully.
            return
