"""A forked process of an engine does not repeat what the process before it has set up: kernels, logging, cores.

On a CPU, vLLM puts functions in the place of Triton's kernels, and for that looks through all that every imported
module has: 0.2 s in each worker, and as many pages of memory copied that were shared. Its logging clears the caches of
some hundred loggers, one after another. It has a shell run lscpu for the cores of the machine. And to look at the class
of a model, it starts a process that imports vLLM, in each process that configures an engine.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies


def register_kernels_once() -> None:
    """Replace the kernels of all imported modules now, and not again in this process and in those forked from it.

    Modules that are imported later find the replacements where the kernels are defined.
    """
    if not applies("kernels that forks inherit"):
        return
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    current_platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(_registered)


def _registered(cls: type) -> None:
    """Stand in for the registration."""


def list_cores_once() -> None:
    """List the cores of the machine that are online now, and not again in this process and in those forked from it.
    Which of them a process may use is found anew each time."""
    if not applies("cores that forks inherit"):
        return
    from vllm.utils import cpu_resource_utils

    module: Any = cpu_resource_utils
    module._get_cpu_list = cache(module._get_cpu_list)
    module._get_cpu_list()


def look_at_models_here() -> None:
    """Look at the class of a model in the process that asks, here and in forks of this process. vLLM starts another one
    where it has no note of an earlier start with this class, since looking may initialize CUDA."""
    if not applies("models that are looked at here"):
        return
    from vllm.model_executor.models import registry

    module: Any = registry
    module._run_in_subprocess = operator.call


def configure_logging_early() -> None:
    """Configure vLLM's logging by the environment, as the first engine in this process or in its forks would. Engines
    that are configured otherwise do it anew."""
    if not applies("logging that forks inherit"):
        return
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def configure_logging_once() -> None:
    """Have this process, and those forked from it, configure vLLM's logging only where it is another one than in the
    process that they were forked from."""
    if not applies("logging that forks inherit"):
        return
    from vllm.logger import configure_logging_if_needed
    from vllm.v1.engine import core
    from vllm.v1.executor import multiproc_executor

    for module in (core, multiproc_executor):
        changed: Any = module
        changed.configure_logging = configure_logging_if_needed
