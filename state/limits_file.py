"""The file of limits in a run directory, as far as the server writes it: it tells frontends that keys have changed.

Frontends map the file (components/frontend/limits/places.py), so that a look costs them no call of the system.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from state.paths import StatePaths

CHANGED_AT = 512
"""Offset of eight bytes that are others after each change."""


def tell_keys_changed(paths: StatePaths) -> None:
    """Have frontends read the registry of keys before their next request. Without a frontend there is no file."""
    # Who is not told so sees it a moment later.
    with suppress(OSError):
        descriptor = os.open(paths.limits_file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, time.time_ns().to_bytes(8, "little"), CHANGED_AT)
        finally:
            os.close(descriptor)
