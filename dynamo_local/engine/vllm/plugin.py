"""vLLM's plugin (entry point `vllm.general_plugins`): runs in every process that vLLM starts.

vLLM's engine and worker processes outlive a parent that is killed, and know no requests that have begun elsewhere.
Forked processes inherit the remedies (launch.py); spawned processes, as on GPUs, begin from nothing and load this.
"""

from __future__ import annotations

import multiprocessing
import os

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.engine.vllm.kv.cache_changes import let_engines_tell_of_caches
from dynamo_local.engine.vllm.parking import let_engines_park
from dynamo_local.engine.vllm.patches.forks import keep_frozen, name_segments
from dynamo_local.process.ancestry import die_with_parent
from state.devices.holding import Bound, mark

_marks: list[Bound] = []
"""Marks of this process' devices. The kernel gives them back when the process ends."""


def register() -> None:
    """Apply the patches of an engine's processes, if this process is a worker of this project or a child of one.

    A child is also killed when its parent dies, and marked with the devices that it is on. In any other process this
    leaves vLLM alone.
    """
    if WATCHER_ENV not in os.environ:
        return
    keep_frozen()
    name_segments(os.environ)
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
        # A spawned process does not inherit the mark. No claim is needed: the parent has the devices.
        _marks.extend(mark(os.environ))
        # Not before a death of the parent is noticed: vLLM and torch take a while to import.
        from dynamo_local.engine.vllm.patches.requests import patch_requests

        patch_requests()
        let_engines_park()
        let_engines_tell_of_caches()
