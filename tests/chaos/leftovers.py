"""What may not be there any more once a server has ended."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tests.integration.server_process import ServerProcess

_OTHERS_MOMENT_S = 3.0


def files_left(server: ServerProcess, sockets: Path) -> list[str]:
    """Processes with the server's marks and files, in words. Logs are meant to stay."""
    found = [f"process left: {process.pid}" for process in server.processes()]
    found += [f"file left: {path}" for path in server.paths.root.iterdir() if path != server.paths.logs_dir]
    if sockets.exists():
        found.append(f"directory left: {sockets}")
    return found


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm, ours or not."""
    return frozenset(os.listdir("/dev/shm"))  # noqa: PTH208  # names


def shared_memory_left(before: frozenset[str]) -> list[str]:
    """What has come since and is used by no live process, in words."""
    new = shared_memory() - before
    if new:
        # Other programs on the machine have some for a moment, too.
        time.sleep(_OTHERS_MOMENT_S)
    return [f"shared memory left: {name}" for name in sorted(_unused(new & shared_memory()))]


def _unused(names: frozenset[str]) -> frozenset[str]:
    used: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                maps = (entry / "maps").read_text(errors="replace")
                used.update(name for name in names if f"/dev/shm/{name}" in maps)
    return names - used
