"""A wall clock that can be stepped while processes run. Other clocks (CLOCK_MONOTONIC) are not changed."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class SteppedClock:
    """The wall clock of processes with the preloaded library: the machine's clock plus an offset."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    def step(self, seconds: int) -> None:
        """Set the offset, in seconds."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("@l", seconds))


@contextmanager
def stepped_clock(folder: Path) -> Iterator[SteppedClock | None]:
    """Give processes that start within the context a clock that can be stepped. None: there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        yield None
        return
    library, file = folder / "clock.so", folder / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    clock = SteppedClock(file)
    added = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(file)}
    os.environ.update(added)
    try:
        yield clock
    finally:
        for name in added:
            del os.environ[name]
