"""What vLLM takes from the environment, decided before it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.engine.vllm.shared_memory import name_segments
from state.devices import CPU_CORES_VARIABLE, OMP_THREADS_VARIABLE, cores_of_slots

IMPORT_DEFAULTS: Mapping[str, str] = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    # On GPUs, NIXL's transport (UCX) wants a TCP socket beside the memory that is read, to notice that the other side
    # has died. Not on all interfaces: it has no authentication (neighbours.py).
    "UCX_NET_DEVICES": "lo",
    # What the ranks of one engine listen on, without authentication either, where there are several.
    "GLOO_SOCKET_IFNAME": "lo",
    # NIXL's own thread and the one that reads share a lock, and an engine's threads share its cores. Who waits for a
    # spinlock on the core of the one who has it waits until its time slice is over, and the other one as long.
    "UCX_USE_MT_MUTEX": "y",
}
"""The same for every process, and wanted before vLLM is imported."""


def prepare_environment(private_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Settle what vLLM reads from the environment. What the user has set stays.

    Shared memory of this process, and of those forked from it, is named by whose it is.
    `private_dir` (mode 0700) takes the temporary files of vLLM, and the sockets between its processes, which have no
    authentication of their own.
    """
    name_segments(environ)
    environ["TMPDIR"] = environ["VLLM_RPC_BASE_PATH"] = str(private_dir)
    defaults = dict(IMPORT_DEFAULTS)
    # "auto" would bind every engine of the machine to the same first core.
    if slots := environ.get(CPU_CORES_VARIABLE):
        # One list for each rank.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = slots
        # Forked engine processes inherit this process's OpenMP, which has read its settings already.
        defaults[OMP_THREADS_VARIABLE] = str(min(map(len, cores_of_slots(slots))))
    for name, value in defaults.items():
        environ.setdefault(name, value)


def start_ranks_on_their_slots() -> None:
    """Have each worker of vLLM's begin on the cores that its rank is to have, in this process and in those forked from
    it. vLLM tells a spawned worker's OpenMP; that of a forked one has read its settings before."""
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


def settle_threads(environ: Mapping[str, str]) -> None:
    """Have the calling thread, and what is forked from it, use as many OpenMP threads as $OMP_NUM_THREADS says.

    OpenMP itself reads the variable when it is loaded, and a forked process has one that was loaded before.
    """
    import torch

    threads = environ.get(OMP_THREADS_VARIABLE, "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def compile_nothing() -> None:
    """Have PyTorch run what vLLM has marked to be compiled as it is, in this process and in those forked from it.

    vLLM compiles some helpers at their first use, even where it is told to be eager: on a CPU, the first request for
    log-probabilities would stop its worker for ten seconds and more.
    """
    if not applies("compiling nothing"):
        return
    from torch._dynamo import config

    config.disable = True


def leave_memory_where_it_is() -> None:
    """Where there is one memory node only, have vLLM's CPU workers not bind themselves to it, in this process and in
    those forked from it.

    Binding has the kernel look for pages on other nodes, of which there are none, and for that it waits until each core
    has done some work of its own. On a core whose engine decodes without a pause that has taken minutes, for which
    the new worker was not there.
    """
    if not applies("leaving memory where it is"):
        return
    import torch
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    if len(get_memory_affinity()) == 1:
        operations: Any = torch.ops._C
        operations.init_cpu_memory_env = lambda nodes: None
