"""Waiting for a moment in which nobody else uses the machine. Bounded: where none comes, one goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from benchmarks.harness.accounting import Process, usage

CALM_CORES = 0.25
"""It is calm while others use less than this, the kernel's own work included."""
_LOOK_S = 0.5


class Patience:
    """So many seconds of waiting, for a whole benchmark."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    async def wait(self, ours: Iterable[Process] = ()) -> None:
        """Wait until it is calm, or patience is at an end. What `ours` use does not count."""
        ours = tuple(ours)
        while self._left_s > 0:
            before, begun = usage(ours), time.monotonic()
            await asyncio.sleep(_LOOK_S)
            if usage(ours).since(before).foreign_cores < CALM_CORES:
                return
            self._left_s -= time.monotonic() - begun
