"""No compilation by PyTorch in engines that are told to be eager.

vLLM marks some helpers to be compiled at their first use, even where `enforce-eager` is set: on a CPU, the first
request for log-probabilities would stop its worker for ten seconds and more.
"""

from __future__ import annotations

from dynamo_local.engine.vllm.patches.check import applies


def disable_compilation() -> None:
    """Run what is marked for compilation uncompiled, in this process and in those forked from it."""
    if not applies("compiling nothing"):
        return
    from torch._dynamo import config

    config.disable = True
