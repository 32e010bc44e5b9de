"""What the processes of an engine have from the process that they are forked from, and how they end.

Nothing that concerns a model: its weights are in loaded_model.py. The modules of vLLM and torch are imported where they
are changed.
"""

from __future__ import annotations

import gc
import multiprocessing
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from multiprocessing import shared_memory
from typing import Any

from dynamo_local.engine.vllm.patches.table import applies
from state.remains import SEGMENTS_ENV

# `gc.unfreeze` does nothing, so that processes of an engine end without searching all they have imported for garbage.
#
# vLLM freezes these objects (gc.freeze) and unfreezes them when an engine ends, for engines that end inside a process
# that goes on. In a forked process the search copies most of the memory shared with other processes, too, and takes
# seconds. The processes here end with their engine, and the kernel frees their memory.


def keep_frozen() -> None:
    """Replace `gc.unfreeze` in this process and in those forked from it."""
    if applies("frozen garbage collection"):
        gc.unfreeze = _stay_frozen


def _stay_frozen() -> None:
    """Stand in for gc.unfreeze."""


# What installed packages register as plugins is read once, before the fork, instead of in each process of an engine.
#
# For each group of plugins, Python opens a file of every installed package: 20 ms in the host of a worker, and again in
# the process that computes.

GROUPS = ("vllm.general_plugins", "vllm.logits_processors")
"""Groups of plugins that an engine's processes look for."""


def list_plugins_once(groups: Iterable[str] = GROUPS) -> None:
    """Have this process, and those forked from it, keep what they have read of installed packages. Reads these groups
    now."""
    if not applies("plugins that forks inherit"):
        return
    module: Any = metadata
    module.entry_points = cache(metadata.entry_points)
    for group in groups:
        metadata.entry_points(group=group)


# Names of the shared memory that Python makes for an engine: they start with a prefix of its worker's own, so that the
# segments can be removed even if all processes are killed at once (state/remains.py).


def name_segments(environ: Mapping[str, str]) -> None:
    """Start names of new segments with $DYN_SHM_PREFIX, in this process and in those forked from it. Without the
    variable Python's names stay."""
    prefix = environ.get(SEGMENTS_ENV)
    if not prefix or not applies("naming shared memory"):
        return
    module: Any = shared_memory
    module._make_filename = lambda: f"/{prefix}{secrets.token_hex(4)}"


# A forked process of an engine does not repeat what the process before it has set up: kernels, logging, cores.
#
# On a CPU, vLLM puts functions in the place of Triton's kernels, and for that looks through all that every imported
# module has: 0.2 s in each worker, and as many pages of memory copied that were shared. Its logging clears the caches
# of some hundred loggers, one after another. It has a shell run lscpu for the cores of the machine. And to look at the
# class of a model, it starts a process that imports vLLM, in each process that configures an engine.
#
# On GPUs, torch asks NVML how many there are, and leaves it initialised: the driver's files stay open in the process,
# which is then not fit to be forked (preload.py).

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
    """Ask NVML for the GPUs of the machine in processes that end, and have torch go by the answers in this process and
    in those forked from it. They are of the whole machine: torch itself applies CUDA_VISIBLE_DEVICES."""
    import torch

    cuda: Any = torch.cuda
    built: Any = torch.backends.cuda.is_built
    if not built() or not applies("GPUs that forks inherit"):
        return
    # torch takes these values for the word that NVML cannot be asked.
    count = _answer_of_child(cuda._raw_device_count_nvml, -1)
    uuids = _answer_of_child(cuda._raw_device_uuid_nvml, None)
    cuda._raw_device_count_nvml = lambda: count
    cuda._raw_device_uuid_nvml = lambda: uuids


def _answer_of_child(question: Callable[[], Any], otherwise: Any) -> Any:
    """Return what a forked process answers; `otherwise` if it ends without an answer, or gives none in time."""
    context = multiprocessing.get_context("fork")
    answers, told = context.Pipe(duplex=False)
    child = context.Process(target=lambda: told.send(question()), daemon=True)
    child.start()
    told.close()
    try:
        return answers.recv() if answers.poll(_NVML_WITHIN_S) else otherwise
    except EOFError:
        return otherwise
    finally:
        child.kill()
        child.join()
        answers.close()


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
