"""A wall clock that is stepped while processes run, by libfaketime; CLOCK_MONOTONIC goes on as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARY = "faketime/libfaketimeMT.so.1"
_NOW = "+0\n"


def library() -> Path | None:
    """Where it is installed (Debian's package libfaketime); None: it is not."""
    return next(iter(Path("/usr/lib").glob(f"*/{_LIBRARY}")), None)


class SteppedClock:
    """For the processes that are started within `for_children`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self._file = folder / "clock"
        self._file.write_text(_NOW)

    def step(self, seconds: float) -> None:
        """From now on the clock shows so much more, or less, than the machine's."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{seconds:+.3f}\n")
        draft.replace(self._file)

    @contextmanager
    def for_children(self) -> Iterator[None]:
        """Processes started meanwhile see this clock."""
        added = {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


@contextmanager
def stepped_clock(folder: Path) -> Iterator[SteppedClock | None]:
    """For the processes that are started meanwhile; None: there is no library, they see the machine's clock."""
    found = library()
    if found is None:
        yield None
        return
    clock = SteppedClock(found, folder)
    with clock.for_children():
        yield clock
