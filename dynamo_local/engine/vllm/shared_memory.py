"""Shared memory of an engine's processes, through which they talk: named by whose it is, so that it can be removed even
if all of them are killed at once (state/remains.py)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from dynamo_local.engine.vllm.patches.table import applies
from state.processes import descendants
from state.remains import SEGMENTS_ENV, record_segments


def name_segments(environ: Mapping[str, str]) -> None:
    """Have shared memory that Python makes in this process, and in those forked from it, be named as $DYN_SHM_PREFIX
    says. Without it, names stay as they are."""
    prefix = environ.get(SEGMENTS_ENV)
    if not prefix or not applies("naming shared memory"):
        return
    module: Any = shared_memory
    module._make_filename = lambda: f"/{prefix}{secrets.token_hex(4)}"


def note_segments(private_dir: Path, environ: Mapping[str, str]) -> None:
    """Record which shared memory an engine has that is up: what is not made by Python has names of its own."""
    if SEGMENTS_ENV in environ:
        record_segments(private_dir, descendants(os.getpid()))
