"""Private small file systems, which can be filled up without harm to the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MARK = "CHAOS_PRIVATE"
_DISK_MB, _SHM_MB = 256, 1024
SHM = Path("/dev/shm")

_MOUNT = (
    f'mount -t tmpfs -o size={_DISK_MB}m,mode=0700 disk "$1" && '
    f'mount -t tmpfs -o size={_SHM_MB}m,mode=1777 shm {SHM} && shift && exec "$@"'
)


def is_private() -> bool:
    """Return whether this process has private file systems."""
    return _MARK in os.environ


def why_not() -> str | None:
    """Return why private file systems are not possible on this machine; None if they are."""
    if shutil.which("unshare") is None:
        return "there is no `unshare` (util-linux)"
    tried = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "try", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no user and mount namespace: {tried.stderr.strip()}"


def enter(disk: Path, module: str, arguments: Sequence[str]) -> int:
    """Run the module again with private file systems in the folder and in /dev/shm. Returns its exit code.

    The file systems and their contents are gone when the module ends.
    """
    disk.mkdir(parents=True, exist_ok=True)
    within = ["sh", "-c", _MOUNT, "sh", str(disk), sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", *within], env={**os.environ, _MARK: str(disk)}, check=False
    )
    return done.returncode


def disk() -> Path | None:
    """Return the folder with the private file system; None if there is none."""
    return Path(os.environ[_MARK]) if is_private() else None
