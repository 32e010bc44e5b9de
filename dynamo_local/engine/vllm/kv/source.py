"""Source of prefix pulls: finds cached blocks by content, and leases them to readers once they are written.

Pure: the pool and the clock are the caller's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dynamo_local.engine.kv.leases import Key, Leases, Pool
from dynamo_local.engine.vllm.kv.pull.messages import LONGEST_LEASE_S, Pinned

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


# Tells when a block that stands in the cache has really been written.
#
# vLLM registers the hashes of the blocks that a step is about to fill when it *schedules* the step, up to a whole chunk
# of a prefill ahead of the forward pass that writes them. Scheduled steps end in order, and when one has ended all its
# writes, and those of the steps before it, are visible. So what stood in the cache when n steps had been scheduled is
# written once n steps have ended.
#
# Scheduling synchronously (vLLM on CPU), the engine's loop handles questions only between steps, and none is ever under
# way. With asynchronous scheduling (the default on GPUs) there is always one.


class StepFence:
    """Counts steps in and out. Pure."""

    def __init__(self) -> None:
        self.scheduled = 0
        self.ended = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def schedule(self) -> None:
        """Note that one more step is on its way."""
        self.scheduled += 1

    def end(self) -> None:
        """Note that the first of the steps on their way has ended."""
        assert self.ended < self.scheduled, "a step ended that was not scheduled"
        self.ended += 1
        while self._waiting and self._waiting[0][0] <= self.ended:
            self._waiting.popleft()[1]()

    def when_written(self, do: Callable[[], None]) -> None:
        """Call once all steps scheduled up to now have ended: at once if none is on its way."""
        if self.ended == self.scheduled:
            do()
        else:
            self._waiting.append((self.scheduled, do))


# Finds the block that begins with the tokens behind a context's last full block.
#
# No hash stands for a block that is not full, but a request that runs here may have its KV. The block is found by its
# tokens, and the one before it by its hash.


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

    What is scheduled but not computed counts as there: the caller waits for it (`StepFence`). What a request has
    drafted and not accepted is none of its tokens.
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


KEPT_SHARE = 0.5
"""Largest share of the pool that pins and holds keep: requests here need the rest to make progress."""


class CachePool(Pool, Protocol):
    """A pool whose blocks are found by the hash of their content, from the moment at which somebody is to write it."""

    @property
    def total(self) -> int:
        """Number of blocks."""

    def find(self, block_hash: bytes) -> int | None:
        """Find a block that stands under this hash."""

    def stands(self, block: int, block_hash: bytes) -> bool:
        """Whether this block stands under this hash."""


class PullSource:
    """Pins and holds of one engine. Called by one thread, between the steps that `fence` counts."""

    def __init__(self, pool: CachePool, fence: StepFence, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._fence = fence
        self._clock = clock
        self.leases = Leases(pool, int(pool.total * KEPT_SHARE))

    def cached(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is cached, or about to be."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def pin(
        self, name: str, hashes: Sequence[bytes], until: float, partial: PartialBlock | None = None
    ) -> Future[Pinned]:
        """Keep the longest cached prefix for a reader, and `partial` behind it if that is all of it. Answered when all
        of it is written."""
        answer: Future[Pinned] = Future()
        key = Key("pin", name)
        self.expire()
        blocks = self.cached(hashes)
        if partial is not None and len(blocks) == len(hashes):
            blocks.append(partial.block)
        refused = self.leases.take(key, blocks, until) if blocks else "nothing of it is cached"
        if refused is None:
            self._fence.when_written(lambda: answer.set_result(self._settle(key, hashes, partial)))
        else:
            answer.set_result(Pinned((), refused))
        return answer

    def hold(self, name: str, blocks: Sequence[int], hold_s: float) -> str | None:
        """Keep the blocks of a request that has finished, or say why not."""
        return self.leases.take(Key("hold", name), blocks, self._clock() + min(hold_s, LONGEST_LEASE_S))

    def release(self, pins: Sequence[str], holds: Sequence[str]) -> None:
        """End these leases before their time, and all whose time is over. Unknown ones are ignored."""
        for name in pins:
            self.leases.end(Key("pin", name))
        for name in holds:
            self.leases.end(Key("hold", name))
        self.expire()

    def confirm(self, name: str) -> bool:
        """End a pin. Returns whether it was held: a lease ends before the first of its blocks is reused."""
        self.expire()
        return self.leases.end(Key("pin", name))

    def expire(self) -> None:
        """End the leases whose time is over."""
        self.leases.expire(self._clock())

    def _settle(self, key: Key, hashes: Sequence[bytes], partial: PartialBlock | None) -> Pinned:
        """Shorten a pin to the blocks that stand now that all of them are written.

        The lease may have ended, and an engine takes back the hashes of blocks whose step has failed.
        """
        blocks = self.leases.blocks(key)
        good = 0
        while good < min(len(blocks), len(hashes)) and self._pool.stands(blocks[good], hashes[good]):
            good += 1
        rest = 0
        if partial is not None and len(hashes) == good < len(blocks) and partial.stands():
            good, rest = good + 1, partial.tokens
        if blocks:
            self.leases.shrink(key, good)
        return Pinned(blocks[:good], None if good else "its blocks are gone", rest)
