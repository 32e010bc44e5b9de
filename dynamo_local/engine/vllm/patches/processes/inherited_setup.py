"""A forked process of an engine does not repeat what the process before it has set up: kernels, logging, cores.

On a CPU, vLLM puts functions in the place of Triton's kernels, and for that looks through all that every imported
module has: 0.2 s in each worker, and as many pages of memory copied that were shared. Its logging clears the caches of
some hundred loggers, one after another. And it has a shell run lscpu for the cores of the machine.

On GPUs, torch asks NVML how many there are, and leaves it initialised: the driver's files stay open in the process,
which is then not fit to be forked (preload.py).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

_NVML_WITHIN_S = 60.0
"""Without persistence mode, the driver is loaded first, which takes seconds for each GPU."""


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


def ask_nvml_in_children() -> None:
    """Have torch ask NVML in processes that end, and each question once: the answers are of the machine, whatever
    CUDA_VISIBLE_DEVICES says. Processes that are forked from this one know them."""
    if not applies("GPUs that forks inherit"):
        return
    import torch

    cuda: Any = torch.cuda
    cuda._raw_device_count_nvml = cache(partial(_answer_of_child, cuda._raw_device_count_nvml))
    cuda._raw_device_uuid_nvml = cache(partial(_answer_of_child, cuda._raw_device_uuid_nvml))


def _answer_of_child(question: Callable[[], Any]) -> Any:
    """Return what a forked process answers. Raises OSError, as without NVML, if it ends or does not answer in time."""
    context = multiprocessing.get_context("fork")
    answers, told = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(question, told), daemon=True)
    child.start()
    told.close()
    try:
        if not answers.poll(_NVML_WITHIN_S):
            raise OSError(f"NVML has not answered for {_NVML_WITHIN_S:g} s")
        return answers.recv()
    except EOFError as error:
        raise OSError("NVML cannot be asked") from error
    finally:
        child.kill()
        child.join()
        child.close()
        answers.close()


def _answer(question: Callable[[], Any], told: Connection) -> None:
    told.send(question())


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
