"""Reads small files of /proc and /sys, and the room on disks. What cannot be read is None."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def text_of(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def number_of(path: str | Path) -> int | None:
    """The number in a file; None also for a word such as "max"."""
    text = text_of(path)
    return int(text) if text is not None and text.isdigit() else None


def room(path: Path) -> tuple[int, int] | None:
    """Bytes that are free for this user, and size, of the file system that holds the path."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    # Not `Path.exists`, which raises where a folder above may not be entered.
    while not os.access(path, os.F_OK) and path != path.parent:
        path = path.parent
    return path


def size_of(folder: Path, at_most_files: int = 20_000) -> int | None:
    """Bytes of all files below a folder; None if there are more than `at_most_files`, which takes too long."""
    total = files = 0
    folders = [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                files += 1
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        if files > at_most_files:
            return None
    return total
