"""Environment variables of vLLM, settled before it is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dynamo_local.engine.vllm.arguments import REFUSED_VARIABLES
from dynamo_local.engine.vllm.patches.forks import name_segments
from dynamo_local.sdk.config.schema import check_variables
from state.devices.allocation import CPU_CORES_VARIABLE, OMP_THREADS_VARIABLE, SHARE_VARIABLE, cores_of_slots

IMPORT_DEFAULTS: Mapping[str, str] = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM's own deadline has a regular expression compiled in a thread of its own, where the time that it computes is
    # not seen: grammar-timeout-s bounds that, and waiting for a core does not count.
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",
    # On GPUs, NIXL's transport (UCX) wants a TCP socket beside the memory that is read, to notice that the other side
    # has died. Not on all interfaces: it has no authentication (engine/kv/network.py).
    "UCX_NET_DEVICES": "lo",
    # What the ranks of one engine listen on, without authentication either, where there are several.
    "GLOO_SOCKET_IFNAME": "lo",
    # NIXL's own thread and the one that reads share a lock, and an engine's threads share its cores. A thread that
    # spins on the core of the lock's owner keeps both waiting until its time slice is over.
    "UCX_USE_MT_MUTEX": "y",
}
"""Variables that are the same for every process, to be set before vLLM is imported."""

_PLUGINS, _OWN_PLUGIN = "VLLM_PLUGINS", "dynamo_local"
"""A list of the plugins that vLLM loads, and the name of this project's (plugin.py), without which spawned processes of
an engine outlive it."""


def prepare_environment(private_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Settle what vLLM reads from the environment. What the user has set stays. Raises ConfigError for what is refused:
    on a node of a cluster, the environment is the node's.

    Shared memory of this process, and of those forked from it, is named by whose it is.
    `private_dir` (mode 0700) takes the temporary files of vLLM, and the sockets between its processes, which have no
    authentication of their own.
    """
    check_variables(environ, REFUSED_VARIABLES)
    name_segments(environ)
    if (plugins := environ.get(_PLUGINS)) is not None and _OWN_PLUGIN not in plugins.split(","):
        environ[_PLUGINS] = f"{plugins},{_OWN_PLUGIN}"
    environ["TMPDIR"] = environ["VLLM_RPC_BASE_PATH"] = str(private_dir)
    defaults = dict(IMPORT_DEFAULTS)
    # "auto" would bind every engine of the machine to the same first core.
    if slots := environ.get(CPU_CORES_VARIABLE):
        # One list for each rank. Workers that share a slot use any of its cores, each with fewer threads: bound to one
        # core each, their threads would meet on the same ones.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if environ.get(SHARE_VARIABLE) else slots
        # Forked engine processes inherit this process's OpenMP, which has read its settings already.
        defaults[OMP_THREADS_VARIABLE] = str(min(map(len, cores_of_slots(slots))))
    for name, value in defaults.items():
        environ.setdefault(name, value)


def settle_threads(environ: Mapping[str, str]) -> None:
    """Have the calling thread, and what is forked from it, use as many OpenMP threads as $OMP_NUM_THREADS says.

    OpenMP itself reads the variable when it is loaded, and a forked process has one that was loaded before.
    """
    import torch

    threads = environ.get(OMP_THREADS_VARIABLE, "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
