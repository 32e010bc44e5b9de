"""Raylets of a test, and what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.raylets import Raylets, raylet_pid, raylets

__all__ = ["Raylets", "raylet_pid", "raylets", "runs", "until"]


def until(test: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until the test holds."""
    deadline = time.monotonic() + within_s
    while not test():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
