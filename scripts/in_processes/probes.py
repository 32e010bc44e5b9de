"""Notes which test runs which of some lines, in whatever process: scripts/mutants.py puts calls of `hit` there."""

from __future__ import annotations

import os
from pathlib import Path

PROBES = "DYN_PROBES"
"""Environment variable with the file to note in."""
TEST = "DYN_PROBED_TEST"
"""Environment variable with the file that holds the node id of the test that runs, in a process with tests and in all
that it starts."""
_noted: set[tuple[int, str]] = set()


def hit(number: int) -> None:
    """Note that the line with this number is run for the test that runs now. Returns None."""
    test = Path(os.environ[TEST]).read_text() if TEST in os.environ else ""
    if test and PROBES in os.environ and (number, test) not in _noted:
        _noted.add((number, test))
        with Path(os.environ[PROBES]).open("a") as file:
            file.write(f"{number} {test}\n")


def begin_test(test: str) -> None:
    """Have what is run from now on be for this test."""
    path = Path(f"{os.environ[PROBES]}.{os.getpid()}")
    os.environ[TEST] = str(path)
    path.write_text(test)
