"""Runs in every process that vLLM starts (entry point `vllm.general_plugins`).

vLLM's engine and worker processes outlive a parent that is killed. Forked ones are covered from before they start
(engine.py); spawned ones, as on GPUs, begin from nothing and load this.
"""

from __future__ import annotations

import multiprocessing
import os

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.runtime.processes import die_with_parent


def register() -> None:
    """Have this process killed when its parent dies, if it is a child of one of this project's workers.

    Anywhere else this leaves vLLM alone.
    """
    parent = multiprocessing.parent_process()
    if WATCHER_ENV in os.environ and parent is not None:
        die_with_parent(parent.pid)
