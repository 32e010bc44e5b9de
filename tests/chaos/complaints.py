"""Errors that the product has logged. It has a word for whatever happens outside: an error in a log is its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PRODUCT = ("dynamo_local", "components", "asyncio")
"""Loggers; the last one tells of exceptions that nobody has seen."""


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_PRODUCT):
            self.found.append(f"logged by the frontend: {record.name}: {record.getMessage()}")


@contextmanager
def complaints_here() -> Iterator[list[str]]:
    """Errors logged in this process meanwhile, in words."""
    collector = _Collector()
    logging.getLogger().addHandler(collector)
    try:
        yield collector.found
    finally:
        logging.getLogger().removeHandler(collector)


def complaints_in(logs: Path) -> list[str]:
    """Errors in the logs of the server's processes, in words."""
    marks = [f" ERROR {name}" for name in _PRODUCT]
    found: list[str] = []
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        found += [f"in {log.name}: {line}" for line in lines if any(mark in line for mark in marks)]
    return found
