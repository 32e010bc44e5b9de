"""`gc.unfreeze` does nothing, so that processes of an engine end without searching all they have imported for garbage.

vLLM freezes these objects (gc.freeze) and unfreezes them when an engine ends, for engines that end inside a process
that goes on. In a forked process the search copies most of the memory shared with other processes, too, and takes
seconds. The processes here end with their engine, and the kernel frees their memory.
"""

from __future__ import annotations

import gc

from dynamo_local.engine.vllm.patches.check import applies


def keep_frozen() -> None:
    """Replace `gc.unfreeze` in this process and in those forked from it."""
    if applies("frozen garbage collection"):
        gc.unfreeze = _stay_frozen


def _stay_frozen() -> None:
    """Stand in for gc.unfreeze."""
