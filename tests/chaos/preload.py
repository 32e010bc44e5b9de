"""Importing this imports what a worker with a mocker needs, to be forked afterwards: the launcher, the leash and the
fork server are under fire, too, and a worker that was killed costs little to start."""

from __future__ import annotations

import components.workers.worker
import dynamo_local.engine.mocker.engine
import dynamo_local.process.main

READ_LATER = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
"""No mocker reads them."""

__all__ = ["components", "dynamo_local"]
