"""Fills a file system up for a while."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

_CHUNK = 1 << 20


class Filler:
    """Fills the file system of a folder up to its last block."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / ".filler"

    async def fill(self, seconds: float) -> None:
        """Keep the file system full for `seconds`."""
        try:
            await asyncio.to_thread(self._write)
            await asyncio.sleep(seconds)
        finally:
            self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            for size in (_CHUNK, 1):
                try:
                    while True:
                        os.write(file.fileno(), bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
