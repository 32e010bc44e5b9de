"""Ranks of a forked engine start on the cores of their slots.

vLLM tells the OpenMP of a spawned worker its cores. The OpenMP of a forked worker has read its settings before the
fork, so the process itself is bound while the worker starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies


def start_ranks_on_their_slots() -> None:
    """Start each of vLLM's workers on its rank's cores, in this process and in those forked from it."""
    if not applies("ranks on their slots"):
        return
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    manager: Any = OMPProcessManager
    original = manager.configure_omp_envs

    @contextmanager
    def configure(self: Any, rank: int, local_rank: int) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        if self.cpu_lists:
            os.sched_setaffinity(0, self.cpu_lists[local_rank])
        try:
            with original(self, rank, local_rank):
                yield
        finally:
            os.sched_setaffinity(0, before)

    manager.configure_omp_envs = configure
