"""Failures that a test orders of one engine while it runs. Not here: what the engine does then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

Order = Literal["raise", "hang"]
"""The next step raises EngineError, as every call after it; or it never ends."""


class Orders:
    """Reads the orders for this process: a file in the folder that is named by its pid and contains the order."""

    def __init__(self, folder: Path) -> None:
        self._file = order_file(folder, os.getpid())

    def take(self) -> Order | None:
        """Take the order, if there is one. Its file is removed, by which the test sees that it was taken."""
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        self._file.unlink()
        return next((order for order in get_args(Order) if order == text), None)


def order_file(folder: Path, pid: int) -> Path:
    """Path of the order for a process' engine. Write another file and rename it to this one, so that it is whole."""
    return folder / str(pid)
