"""What vLLM takes from the environment, decided before it is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPU_CORES_ENV = "DYN_CPU_CORES"
"""Cores of the worker's CPU slot, comma-separated. Set with the device claim."""


def prepare_environment(private_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Settle what vLLM reads from the environment. What the user has set stays.

    `private_dir` (mode 0700) takes the temporary files of vLLM, and the sockets between its processes, which have no
    authentication of their own.
    """
    environ["TMPDIR"] = environ["VLLM_RPC_BASE_PATH"] = str(private_dir)
    defaults = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # NIXL's transport wants a TCP socket beside shared memory, to notice that the other side has died. Not on all
        # interfaces: it has no authentication.
        "UCX_NET_DEVICES": "lo",
    }
    # "auto" would bind every engine of the machine to the same first core.
    if cores := environ.get(CPU_CORES_ENV):
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = cores
        # Forked engine processes inherit this process's OpenMP, which has read its settings already.
        defaults["OMP_NUM_THREADS"] = str(len(cores.split(",")))
    for name, value in defaults.items():
        environ.setdefault(name, value)
