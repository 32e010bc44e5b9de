"""Notice of every reference to a KV block that vLLM takes or gives up.

The leases (engine/kv/leases.py) count the blocks that nothing but leases keeps. Without a notice they would have to
look at all their blocks with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def report_references(pool: BlockPool, changed: Callable[[Iterable[int]], None]) -> None:
    """Call `changed` with the ids of blocks whose count of references has changed, whoever has changed it."""
    # Through a name of no type: mypy sees no more than that methods are assigned.
    patched: Any = pool
    touch, free = patched.touch, patched.free_blocks

    def touch_and_report(blocks: Sequence[KVCacheBlock]) -> None:
        touch(blocks)
        changed(block.block_id for block in blocks)

    def free_and_report(ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        free(blocks)
        changed(block.block_id for block in blocks)

    patched.touch, patched.free_blocks = touch_and_report, free_and_report
