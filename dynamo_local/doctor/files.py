"""Small files of /proc and /sys, the namespaces of the state folder, and sizes. What cannot be read is None."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from state.paths import KEPT, StatePaths

GIB = 2**30
MIB = 2**20
OTHERS = 0o077
"""What other users may do, in the mode of a file."""

_OURS = frozenset({"json", "lock", "run", *KEPT})


def text_of(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def number_of(path: str | Path) -> int | None:
    """The number in a file; None also for a word such as "max"."""
    text = text_of(path)
    return int(text) if text is not None and text.isdigit() else None


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


def shown_bytes(size: int) -> str:
    """A size for people: "512 MiB", "3.2 GiB"."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def namespaces(root: Path) -> list[StatePaths]:
    """The paths of the namespaces, sorted by name. Empty if the folder cannot be read."""
    names: set[str] = set()
    with suppress(OSError):
        for path in root.iterdir():
            name, _, rest = path.name.partition(".")
            if rest.partition(".")[0] in _OURS:
                names.add(name)
    found: list[StatePaths] = []
    for name in sorted(names):
        with suppress(ConfigError):
            found.append(StatePaths(root, name))
    return found
