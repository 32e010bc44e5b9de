"""A pool of KV blocks with a prefix cache.

A block has references, of requests that use it and of leases, or is free. A block that was filled keeps its content's
hash when it becomes free, and is found by it until it is taken for something else. Blocks without content are taken
first, then those that have been free for longest.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from dynamo_local.engine.kv.cache_log import CacheLog

BlockHash = bytes
"""Names a full block's content and all that precedes it. The same in every process."""

HASH_BYTES = 16


def root_hash(cache_salt: str | None, adapter: str | None) -> BlockHash:
    """Hash that the first block of a request is chained to. Requests with different salts or adapters share nothing."""
    root = b"" if cache_salt is None else blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()
    if adapter is None:
        return root
    return blake2b(root + adapter.encode(), digest_size=HASH_BYTES, person=b"adapter").digest()


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of the full block with these tokens (each in 0 to 2**63 - 1) that follows `parent`."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return blake2b(parent + packed, digest_size=HASH_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], root: BlockHash, block_size: int, count: int) -> list[BlockHash]:
    """Hashes of the first `count` blocks of a context, all of which are full."""
    found, parent = [], root
    for start in range(0, count * block_size, block_size):
        parent = chain_hash(parent, token_ids[start : start + block_size])
        found.append(parent)
    return found


class BlockPool:
    """Block ids are 0 to `total` - 1.

    Invariants: a block is free if and only if nothing refers to it; a hash leads to one block, which holds that content
    (or is given it by the step under way), referenced or not. Without `keep_freed`, free blocks have no hash, and are
    taken again as soon as possible.
    """

    def __init__(self, total: int, *, keep_freed: bool = True) -> None:
        self.total = total
        self._keep_freed = keep_freed
        self._references = [0] * total
        self._hashes: list[BlockHash | None] = [None] * total
        self._by_hash: dict[BlockHash, int] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, the longest free first."""
        self.log = CacheLog()
        """What enters and leaves the prefix cache. (Without `keep_freed`, contents of referenced blocks.)"""
        self._report: Callable[[Iterable[int]], None] = lambda blocks: None

    def report_references(self, changed: Callable[[Iterable[int]], None]) -> None:
        """Call `changed` with blocks whose count of references has changed, except those newly taken."""
        self._report = changed

    @property
    def free(self) -> int:
        """Blocks that can be taken, those with cached content included."""
        return len(self._blank) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks with content that can be found."""
        return len(self._by_hash)

    def references_to(self, block: int) -> int:
        """Count the references to a block, of requests and leases together."""
        return self._references[block]

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Find the blocks of the longest cached prefix. Takes no reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def free_beside(self, blocks: Iterable[int]) -> int:
        """Count the blocks that would be free if these had a reference more."""
        return self.free - sum(self._references[block] == 0 for block in blocks)

    def refer(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these cached blocks, as found by `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        self._report(blocks)

    def allocate(self, count: int) -> list[int]:
        """Take blocks to be filled, with one reference each. `count` is at most `free`."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Note that a referenced block is filled. Another block that has this content already stays the cached one."""
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash
            self.log.stored(block_hash)

    def give_up(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block. The last, least shared, is evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"nobody refers to block {block}"
            self._references[block] -= 1
            self._reclaim(block)
        self._report(blocks)

    def empty(self) -> bool:
        """Forget the content of all blocks. False, and nothing is forgotten, if any of them is referred to."""
        if self.free < self.total:
            return False
        while self._evictable:
            self._blank.append(self._evict())
        self.log.cleared()
        return True

    def _reclaim(self, block: int) -> None:
        if self._references[block] > 0:
            return
        if self._hashes[block] is not None and self._keep_freed:
            self._evictable[block] = None
        else:
            self._forget_content(block)
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._forget_content(block)
        return block

    def _forget_content(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            self.log.removed(block_hash)
