"""Runs in every process that vLLM starts (entry point `vllm.general_plugins`).

vLLM's engine and worker processes outlive a parent that is killed. Forked ones are covered from before they start
(engine.py); spawned ones, as on GPUs, begin from nothing and load this.
"""

from __future__ import annotations

import multiprocessing
import os

from dynamo_local.runtime.processes import die_with_parent

MARK_ENV = "DYN_WATCHER"
"""Set in all processes of a server of this project. Without it this plugin leaves vLLM alone."""


def register() -> None:
    """Have this process killed when its parent dies, if it is a child process of one of this project's workers."""
    parent = multiprocessing.parent_process()
    if MARK_ENV in os.environ and parent is not None:
        die_with_parent(parent.pid)
