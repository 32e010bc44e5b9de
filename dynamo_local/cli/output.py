"""Output of commands: tables, and the lines of a report."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

import click

from dynamo_local.core.names import short_watcher

_ERASE = "\r\033[K"
"""Erases the line that a terminal's cursor is on."""


def facts(known: Iterable[tuple[str, str]]) -> str:
    """Return a line for each name and text, or more where the text has more; none where the text is empty."""
    shown = [(name, text) for name, text in known if text]
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name:{width}}  {text}".replace("\n", f"\n{' ' * width}  ") for name, text in shown)


def date(at: float) -> str:
    """Return a time of the wall clock, in seconds since 1970, as people here read it."""
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], without: Collection[str] = ()) -> str:
    """Return the rows as text, in columns as wide as their widest cell. `without`: headers of columns to leave out."""
    columns = [column for column in zip(headers, *rows, strict=True) if column[0] not in without]
    widths = [max(map(len, column)) for column in columns]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in zip(*columns, strict=True))
    return "\n".join(line.rstrip() for line in lines)


def print_json(content: Any) -> None:
    """Print what --json asks for."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2))


def print_result(content: Any, text: Callable[[Any], str], *, as_json: bool) -> None:
    """Print what was found, or came of an order: with --json all of it, else as `text` has it."""
    if as_json:
        print_json(content)
    else:
        click.echo(text(content))


class Console:
    """A report (supervisor.server.report.Report) on standard output, or on standard error if `err`. Steps show the
    seconds since the console was made, and watchers by their short names, as tables do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, err: bool = False) -> None:
        self._clock = clock
        self._err = err
        self._started = clock()
        self._is_terminal = (sys.stderr if err else sys.stdout).isatty()
        self._pending = ""
        self._awaited = ""

    def step(self, text: str) -> None:
        # Reports begin a line about a watcher with its name and two spaces.
        name, gap, rest = text.partition("  ")
        self._awaited = ""
        self.say(f"{self._stamp()} {short_watcher(name) if gap else name}{gap}{rest}")

    def pending(self, text: str) -> None:
        if not self._is_terminal:
            repeated = text == self._awaited
            self.step("still waiting" if repeated else text)
            self._awaited = text
            return
        width = shutil.get_terminal_size().columns - 1
        self._pending = _ERASE
        self._write(f"{_ERASE}{self._stamp()} {text}"[: len(_ERASE) + width], end="")

    def say(self, text: str) -> None:
        erase, self._pending = self._pending, ""
        self._write(f"{erase}{text}", end="\n")

    def _stamp(self) -> str:
        return f"[{self._clock() - self._started:6.1f}s]"

    def _write(self, text: str, *, end: str) -> None:
        try:
            click.echo(f"{text}{end}", nl=False, err=self._err)
        except OSError:
            # The terminal or the reader of the pipe has gone. A server must still be able to end gracefully.
            return
