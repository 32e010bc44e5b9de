"""Finds what a server that has ended must not leave: processes, files, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.integration.server_process import ServerProcess

_DIRECTORY = Path("/dev/shm")


def files_left(server: ServerProcess, sockets: Path) -> list[str]:
    """Return left processes with the server's marks and left files, in words."""
    found = [f"process left: {process.pid}" for process in server.processes()]
    found += [f"file left: {path}" for path in server.paths.root.iterdir() if not server.paths.is_kept(path)]
    if sockets.exists():
        found.append(f"directory left: {sockets}")
    return found


def block_memories(sockets: Path) -> int:
    """Return the number of files through which mockers read each other's blocks."""
    return len(list(sockets.rglob("*.kv")))


class SharedMemoryWatch:
    """Tracks shared memory that a server's processes have mapped, to tell it from that of other programs."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def sample(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                self._seen.update(re.findall(rf"{_DIRECTORY}/(\S+)", maps))

    def left(self) -> list[str]:
        """Return the tracked shared memory that still exists, in words."""
        return [f"shared memory left: {name}" for name in sorted(self._seen) if (_DIRECTORY / name).exists()]
