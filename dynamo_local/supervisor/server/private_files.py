"""Files of the runtime directory: written by the server, read by its processes, closed to everybody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def write_private(path: Path, data: bytes) -> None:
    """Replace a file's contents; only its owner may read it. Readers come later: this is not atomic."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
