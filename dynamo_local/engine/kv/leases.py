"""Leases on KV blocks: sets of blocks that are kept from being reused, each under a name and until a time.

Kinds of leases: a **pin** is a reader's; a **hold** keeps the blocks of a finished request, for another worker to pin;
a **stray** keeps blocks of this engine into which one of its reads may still write, though it was given up.

Pure: times are arguments, and the pool does to a block what a lease means for it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["pin", "hold", "stray"]

MOST_LEASES = 1024
"""Leases at once. A lease costs an entry, however few blocks it has."""


class Key(NamedTuple):
    """Name of a lease. Leases of different kinds may share a name."""

    kind: Kind
    name: str


class Pool(Protocol):
    """Pool that counts references to its blocks; a block without any may be reused."""

    def refer(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block."""

    def give_up(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block. The last in order are the first to be reused."""

    def references_to(self, block: int) -> int:
        """Count the references to a block, of leases and others together."""


@dataclass
class _Lease:
    blocks: tuple[int, ...]
    until: float


class Leases:
    """The leases on one pool.

    Invariants: a block has one reference for each lease that names it; a lease ends by `end`, or by `expire` once its
    time is over, and never before; no more than `most_blocks` different blocks are in pins and holds.

    Engines call `expire` and `kept` with every step. The cost of both is that of what has changed since the last call,
    however many blocks are in leases.
    """

    def __init__(self, pool: Pool, most_blocks: int, most_leases: int = MOST_LEASES) -> None:
        self._pool = pool
        self._most_blocks = most_blocks
        self._most_leases = most_leases
        self._leases: dict[Key, _Lease] = {}
        self._references: Counter[int] = Counter()
        self._ends: list[tuple[float, Key]] = []
        """Heap of ends. A lease that was ended before its time stays in it until then."""
        self._kept: set[int] = set()
        """Blocks of leases that had no other reference when last looked at."""
        self._changed: set[int] = set()
        """Blocks to be looked at again."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    @property
    def references(self) -> Mapping[int, int]:
        """Blocks that are in leases, each with the number of its leases."""
        return self._references

    @property
    def next_end(self) -> float:
        """Earliest time at which a lease can expire. Infinite without leases."""
        return self._ends[0][0] if self._ends else math.inf

    def note(self, blocks: Iterable[int]) -> None:
        """Note that references to these blocks have been taken or given up, by whomever."""
        self._changed.update(block for block in blocks if block in self._references)

    def kept(self) -> int:
        """Count the blocks that have no references but those of leases. `note` must have been told of all others."""
        for block in self._changed:
            leases = self._references.get(block, 0)
            if leases and self._pool.references_to(block) == leases:
                self._kept.add(block)
            else:
                self._kept.discard(block)
        self._changed.clear()
        return len(self._kept)

    def take(self, key: Key, blocks: Sequence[int], until: float) -> str | None:
        """Start a lease. Returns the reason if it is refused."""
        if key in self._leases:
            return f"there is a {key.kind} of that name already"
        if len(self._leases) >= self._most_leases:
            return "there are too many leases"
        kept, new = len(self._references), len(set(blocks) - self._references.keys())
        if kept + new > self._most_blocks:
            return f"too much of the cache is kept for readers: {kept} of at most {self._most_blocks} blocks"
        self._start(key, blocks, until)
        return None

    def strand(self, name: str, blocks: Sequence[int]) -> None:
        """Keep blocks that something may still write to, until `end`. No limit applies: the danger is there anyway."""
        if Key("stray", name) not in self._leases:
            self._start(Key("stray", name), blocks, math.inf)

    def shrink(self, key: Key, count: int) -> None:
        """Shorten a lease to its first `count` blocks; without any it ends."""
        lease = self._leases[key]
        kept, rest = lease.blocks[:count], lease.blocks[count:]
        if not kept:
            self.end(key)
            return
        lease.blocks = kept
        self._free(rest)

    def blocks(self, key: Key) -> tuple[int, ...]:
        """Blocks of a lease; empty once it has ended."""
        lease = self._leases.get(key)
        return () if lease is None else lease.blocks

    def end(self, key: Key) -> bool:
        """End a lease before its time. Returns whether there was one of that name."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._free(lease.blocks)
        return lease is not None

    def expire(self, now: float) -> bool:
        """End the leases whose time is over. Returns whether there were any."""
        ended = False
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            lease = self._leases.get(key)
            # There may be a later one of that name.
            if lease is not None and lease.until <= now:
                ended |= self.end(key)
        return ended

    def _start(self, key: Key, blocks: Sequence[int], until: float) -> None:
        self._pool.refer(blocks)
        self._leases[key] = _Lease(tuple(blocks), until)
        self._references.update(blocks)
        self._changed.update(blocks)
        if until < math.inf:
            heapq.heappush(self._ends, (until, key))

    def _free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        self._changed.update(blocks)
        self._pool.give_up(blocks)
