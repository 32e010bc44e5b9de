"""The secret from which those are made that sign callbacks (core/async_tasks/callbacks.py)."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from dynamo_local.core.errors import StateError
from state.files import DISK, FILE_MODE, make_private_directory, system_errors
from state.paths import StatePaths

_BYTES = 32


def callback_secret(paths: StatePaths) -> bytes:
    """Return the secret of a namespace. It is made by whoever asks first. Blocks. Raises StateError."""
    path = paths.callback_secret_file
    with system_errors(f"cannot read {path}"):
        if not path.exists():
            _make(paths)
        text = path.read_text(encoding="ascii", errors="replace").strip()
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != _BYTES:
        raise StateError(f"{path} holds no secret", "restore it, or delete it: receivers then need the new secret")
    return found


def _make(paths: StatePaths) -> None:
    """Make the file, as a whole or not at all, unless somebody else was faster."""
    path = paths.callback_secret_file
    make_private_directory(path.parent)
    made = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(descriptor, secrets.token_hex(_BYTES).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(made, path)
        # Receivers know it: a power cut must not have another one made.
        DISK.sync_directory(path.parent)
    finally:
        made.unlink(missing_ok=True)
