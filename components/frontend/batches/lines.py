"""Reads the input of a batch a piece at a time, in threads, so that it is never in memory as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from dynamo_local.core.stored.batches import MOST_ERRORS, LineError
from dynamo_local.core.stored.lines import NOT_UTF8, Line, LineChecks, LineRefusedError, model_of, read_line
from state.files import system_errors

_AT_ONCE = 32
_PAUSE_S = 0.001
"""For other threads, between so many lines: whoever checks a large input must not keep the event loop waiting."""


Wanted = Callable[[str], bool]
"""Whether lines for a model of this name are wanted."""

_MOST_PARTS = 32


def parts_of(path: Path) -> list[Wanted]:
    """Divide the lines of an input by the models that they name, so that those for one need not wait for another. All
    models beyond so many are one part. Blocks. Raises DiskError."""
    reader = InputReader(path)
    try:
        names: dict[str, None] = {}
        while lines := reader.next(()):
            names.update(dict.fromkeys(map(model_of, lines)))
            time.sleep(_PAUSE_S)
    finally:
        reader.close()
    if len(names) <= 1:
        return [_any]
    apart = frozenset(list(names)[:_MOST_PARTS])
    parts: list[Wanted] = [name.__eq__ for name in apart]
    return parts if len(apart) == len(names) else [*parts, lambda name: name not in apart]


def _any(_: str) -> bool:
    return True


class InputReader:
    """Reads lines one piece after the other. Blocks."""

    def __init__(self, path: Path, wanted: Wanted = _any) -> None:
        """Raises DiskError."""
        self._number = 0
        self._wanted = wanted
        with system_errors(f"cannot read {path}"):
            self._file = path.open("rb")

    def next(self, done: Collection[str]) -> list[Line]:
        """Return the next lines of those that are not done; none at the end. Raises DiskError."""
        found: list[Line] = []
        with system_errors("cannot read the input of a batch"):
            while len(found) < _AT_ONCE and (text := self._file.readline()):
                self._number += 1
                if self._number % _AT_ONCE == 0:
                    time.sleep(_PAUSE_S)
                if text.isspace() or (line := read_line(self._number, text)).custom_id in done:
                    continue
                if self._wanted is _any or self._wanted(model_of(line)):
                    found.append(line)
        return found

    def close(self) -> None:
        """Close the input."""
        self._file.close()


def check_input(path: Path, checks: LineChecks, most_lines: int, most_bytes: int) -> tuple[int, tuple[LineError, ...]]:
    """Check all lines of an input. Returns their number, and what is wrong with the first wrong ones. Raises DiskError.

    `most_bytes`: in a line.
    """
    errors: list[LineError] = []
    total = 0
    for number, text in _numbered(path, most_bytes):
        if len(text.removesuffix(b"\n").removesuffix(b"\r")) > most_bytes:
            why = f"line {number}: it is longer than {most_bytes} bytes (setting max-body-bytes)"
            return total, (*errors, LineError("invalid_request", why, None, number))
        if text.isspace():
            continue
        total += 1
        if total > most_lines:
            why = f"there are more than {most_lines} lines (setting max-batch-lines)"
            return total, (*errors, LineError("too_many_lines", why, None, number))
        try:
            checks.check(number, text)
        except LineRefusedError as error:
            errors.append(error.error)
        if len(errors) >= MOST_ERRORS or (errors and errors[-1].code == NOT_UTF8):
            break
        if total % _AT_ONCE == 0:
            time.sleep(_PAUSE_S)
    if not total:
        errors.append(LineError("empty_file", "the input file has no lines"))
    return total, tuple(errors)


def _numbered(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        number = 0
        while text := file.readline(most_bytes + len(b"\r\n")):
            number += 1
            yield number, text
