"""Preloads what a worker with a mocker needs. Such workers are forked, so that launchers and the fork server meet
faults too, and killed workers are cheap to restart."""

from __future__ import annotations

import components.workers.worker
import dynamo_local.engine.mocker.engine
import dynamo_local.process.main

READ_LATER = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
"""Environment variables that the fork server must not have read before it forks. Mockers read none of them."""

__all__ = ["components", "dynamo_local"]
