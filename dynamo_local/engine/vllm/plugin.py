"""Runs in every process that vLLM starts (entry point `vllm.general_plugins`).

vLLM's engine and worker processes outlive a parent that is killed, and know no requests that have begun elsewhere.
Forked ones are covered from before they start (engine.py); spawned ones, as on GPUs, begin from nothing and load this.
"""

from __future__ import annotations

import multiprocessing
import os

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.engine.vllm.patches.processes.garbage import keep_frozen
from dynamo_local.engine.vllm.patches.processes.shared_memory_names import name_segments
from dynamo_local.engine.vllm.patches.requests import patch_requests
from dynamo_local.process.ancestry import die_with_parent
from state.holding import Bound, mark

_marks: list[Bound] = []
"""Never given back but by the kernel."""


def register() -> None:
    """If this process is one of this project's workers, or a child of it: have it end at once when it ends. If it is a
    child, have it killed when its parent dies, say on which devices it is, and continue requests.

    Anywhere else this leaves vLLM alone.
    """
    if WATCHER_ENV not in os.environ:
        return
    keep_frozen()
    name_segments(os.environ)
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
        # Not inherited where it was spawned. Nobody needs to be asked: its parent is on them.
        _marks.extend(mark(os.environ))
        patch_requests()
