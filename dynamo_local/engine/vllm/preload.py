"""Importing this imports what a worker, its engine's processes and the frontend need of vLLM, to be forked afterwards.

Nothing here starts a thread or looks at a GPU: neither survives a fork.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path

from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS, settle_threads
from dynamo_local.engine.vllm.patches.forks import (
    ask_nvml_in_children,
    configure_logging_early,
    list_cores_once,
    list_plugins_once,
    look_at_models_here,
    register_kernels_once,
)

READ_LATER = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
)
"""vLLM, torch and CUDA read these when an engine starts; `settle` sets OpenMP anew."""

_MODULES = (
    # The worker's host.
    "vllm.engine.arg_utils",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "dynamo_local.engine.vllm.engine",
    "dynamo_local.engine.vllm.kv.identity",
    "dynamo_local.engine.vllm.weights",
    "dynamo_local.engine.vllm.requests.lora",
    "dynamo_local.engine.vllm.requests.wire",
    "vllm.v1.engine.core_client",
    # The engine's processes, which import these when they start.
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank",
    "multiprocessing.popen_fork",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.fused_moe.eep_reconfigure",
    "dynamo_local.engine.vllm.patches.requests",
    # The frontend.
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.launchers.api_server",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.launcher",
)

_CPU_MODULES = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "dynamo_local.engine.vllm.kv.pull.connector",
    "dynamo_local.engine.vllm.patches.tuning",
)


def unfit() -> str | None:
    """Say why this process cannot be forked; None if it can."""
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            # Of the listing itself.
            continue
        if target.startswith("/dev/nvidia"):
            return "a GPU is open in it"
    return None


def settle() -> None:
    """Decide anew, in a forked process, what was decided at import."""
    import numpy as np

    settle_threads(os.environ)
    np.random.seed()  # the generator that code without one of its own shares
    tempfile.tempdir = None


def _import() -> None:
    for name, value in IMPORT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # OpenBLAS makes its threads when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # It asks for GPUs while it is imported.
    importlib.import_module("vllm")
    ask_nvml_in_children()
    for module in _MODULES:
        importlib.import_module(module)
    import setproctitle
    from vllm.platforms import current_platform

    from dynamo_local.engine.vllm.launch import engine_parser

    # vLLM names its engine's processes with setproctitle, which looks for the place of command line and environment at
    # its first use, and does not find it in a process whose environment was replaced.
    setproctitle.getproctitle()

    configure_logging_early()
    list_plugins_once()
    engine_parser()
    # The class of the worker depends on the platform.
    if current_platform.is_cpu():
        for module in _CPU_MODULES:
            importlib.import_module(module)
        register_kernels_once()
        list_cores_once()
        look_at_models_here()


_import()
