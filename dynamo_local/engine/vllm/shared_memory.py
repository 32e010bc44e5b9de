"""Records the shared memory of an engine's processes, so that it can be removed after they have been killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from state.machine.processes import descendants
from state.remains import SEGMENTS_ENV, record_segments


def note_segments(private_dir: Path, environ: Mapping[str, str]) -> None:
    """Record the segments of an engine that has started. Native libraries name theirs themselves, so their names are
    known only now (Python's: patches/processes/shared_memory_names.py)."""
    if SEGMENTS_ENV in environ:
        record_segments(private_dir, descendants(os.getpid()))
