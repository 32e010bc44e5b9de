"""Facts about our folders and their disks."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from dynamo_local.core.doctor.storage import Folder, Storage
from dynamo_local.doctor.files import size_of
from dynamo_local.doctor.namespaces import namespaces
from state.files import nearest, room
from state.paths import Sockets, StatePaths

_HEX_CHARS = 8
"""Length of the random part in the name of a folder of sockets (state/files.py)."""


def storage(root: Path, cache: Path) -> Storage:
    found = namespaces(root)
    inner = [path for paths in found for path in (paths.run_dir, paths.logs_dir) if path.is_dir()]
    known = found or [StatePaths(root, "dynamo")]
    return Storage(
        folder(root),
        tuple(map(folder, inner)),
        folder(cache, measured=True),
        all(Sockets(paths.run_dir).fit or _fits_elsewhere(paths) for paths in known),
    )


def folder(path: Path, *, measured: bool = False) -> Folder:
    """`measured`: with the size of its files."""
    base = nearest(path)
    found = base.stat()
    exists = base == path
    free = room(base)
    return Folder(
        str(path),
        stat.S_IMODE(found.st_mode) if exists else None,
        not exists or found.st_uid == os.geteuid(),
        base.is_dir() and os.access(base, os.W_OK | os.X_OK),
        free[0] if free else None,
        size_of(path) if measured and exists else None,
    )


def _fits_elsewhere(paths: StatePaths) -> bool:
    name = f"dynamo-{paths.namespace}-{'0' * _HEX_CHARS}"
    return Sockets(Path(tempfile.gettempdir()) / name).fit
