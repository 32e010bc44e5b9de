"""Writes files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from state.files import system_errors


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600. Not atomic: for files that have no reader yet. Raises DiskError."""
    with (
        system_errors(f"cannot write {path}"),
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
    ):
        file.write(data)


def open_log(path: Path) -> BinaryIO:
    """Open a log of mode 0600 to append to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
