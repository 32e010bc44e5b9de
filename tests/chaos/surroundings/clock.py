"""A wall clock that is stepped while processes run. The others (CLOCK_MONOTONIC) go on as they were."""

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
    """The clock of processes with the library preloaded: it shows the machine's time, and so much more or less."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    def step(self, seconds: int) -> None:
        """From now on."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("@l", seconds))


@contextmanager
def stepped_clock(folder: Path) -> Iterator[SteppedClock | None]:
    """For the processes that are started meanwhile. None: there is no C compiler, they see the machine's clock."""
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
