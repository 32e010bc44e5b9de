"""Names of the shared memory that Python makes for an engine: they start with a prefix of its worker's own, so that the
segments can be removed even if all processes are killed at once (state/remains.py)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing import shared_memory
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies
from state.remains import SEGMENTS_ENV


def name_segments(environ: Mapping[str, str]) -> None:
    """Start names of new segments with $DYN_SHM_PREFIX, in this process and in those forked from it. Without the
    variable Python's names stay."""
    prefix = environ.get(SEGMENTS_ENV)
    if not prefix or not applies("naming shared memory"):
        return
    module: Any = shared_memory
    module._make_filename = lambda: f"/{prefix}{secrets.token_hex(4)}"
