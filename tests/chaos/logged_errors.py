"""Collects errors that the product has logged. Outside faults are logged at lower levels: an error is a defect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PRODUCT = ("dynamo_local", "components", "asyncio")
"""Prefixes of loggers. asyncio logs exceptions of tasks that no code has retrieved."""


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_PRODUCT):
            self.found.append(f"logged by the frontend: {record.name}: {record.getMessage()}")


@contextmanager
def errors_logged_here() -> Iterator[list[str]]:
    """Collect the errors that this process logs within the context, in words."""
    collector = _Collector()
    logging.getLogger().addHandler(collector)
    try:
        yield collector.found
    finally:
        logging.getLogger().removeHandler(collector)


def errors_in_logs(logs: Path) -> list[str]:
    """Return the errors in the logs of the server's processes, in words."""
    marks = [f" ERROR {name}" for name in _PRODUCT]
    found: list[str] = []
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        found += [f"in {log.name}: {line}" for line in lines if any(mark in line for mark in marks)]
    return found
