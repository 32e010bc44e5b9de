"""Source of prefix pulls: finds cached blocks by content, and leases them to readers.

Pure: the pool and the clock are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from dynamo_local.engine.kv.leases import Key, Leases, Pool
from dynamo_local.engine.vllm.kv.fence import StepFence
from dynamo_local.engine.vllm.kv.partial_block import PartialBlock
from dynamo_local.engine.vllm.kv.pull.messages import LONGEST_LEASE_S, Pinned

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
