"""No binding of memory by vLLM's CPU workers on machines with a single memory node.

Binding has the kernel look for pages on other nodes, of which there are none, and for that it waits until each core
has done some work of its own. On a core whose engine decodes without a pause that has taken minutes, during which the
new worker served nothing.
"""

from __future__ import annotations

from typing import Any

from dynamo_local.engine.vllm.patches.check import applies


def skip_memory_binding() -> None:
    """Leave memory unbound where there is one memory node only, in this process and in those forked from it."""
    if not applies("leaving memory where it is"):
        return
    import torch
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    if len(get_memory_affinity()) == 1:
        operations: Any = torch.ops._C
        operations.init_cpu_memory_env = lambda nodes: None
