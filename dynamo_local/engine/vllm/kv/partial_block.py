"""Finds the block that begins with the tokens behind a context's last full block.

No hash stands for a block that is not full, but a request that runs here may have its KV. The block is found by its
tokens, and the one before it by its hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@dataclass(frozen=True)
class PartialBlock:
    """KV of so many tokens, at the beginning of a block that a request goes on writing to. `stands()`, to be called
    between steps: whether it is still there."""

    block: int
    tokens: int
    stands: Callable[[], bool]


def find_partial_block(
    scheduler: Scheduler, block_size: int, hashes: Sequence[bytes], rest: Sequence[int]
) -> PartialBlock | None:
    """Find a running request's block that begins with tokens of `rest`.

    `hashes` are of a context's full blocks, `rest` are the tokens behind them: fewer than a block has.

    What is scheduled but not computed counts as there: the caller waits for it (fence.py). What a request has drafted
    and not accepted is none of its tokens.
    """
    if not hashes or not 0 < len(rest) < block_size:
        return None
    for request in scheduler.running:
        tokens = _in_common(request, block_size, hashes, rest)
        if tokens > 0:
            return _partial_block(scheduler, request, len(hashes), len(hashes) * block_size + tokens, tokens)
    return None


def _in_common(request: Request, block_size: int, hashes: Sequence[bytes], rest: Sequence[int]) -> int:
    """Count the tokens of `rest` that the request has the KV of, behind the same full blocks."""
    full = len(hashes)
    if len(request.block_hashes) < full or request.block_hashes[full - 1] != hashes[-1]:
        return 0
    begin = full * block_size
    computed = request.all_token_ids[begin : min(request.num_computed_tokens, begin + len(rest))]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(computed, rest, strict=False))
    return sum(1 for _ in same)


def _partial_block(scheduler: Scheduler, request: Request, full: int, end: int, tokens: int) -> PartialBlock | None:
    def block() -> int | None:
        blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return blocks[full] if full < len(blocks) else None

    found = block()
    if found is None:
        return None

    def stands() -> bool:
        # A request that has been preempted, or whose step has failed, computes the block again; one that has ended may
        # have ended because of that.
        known = scheduler.requests.get(request.request_id) is request
        return known and request.num_computed_tokens >= end and block() == found

    return PartialBlock(found, tokens, stands)
