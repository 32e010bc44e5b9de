"""Who keeps which KV blocks from being reused, and until when.

Kinds of leases: a **pin** is a reader's, a **hold** is that of a finished request whose blocks somebody may still pin,
and a **stray** is a read of this engine's own into blocks of its own that was given up and has not ended.

Pure: times are arguments, and what a lease does to a block is the pool's business.
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
"""Each pin of the most modest reader costs an entry."""


class Key(NamedTuple):
    """Names a lease."""

    kind: Kind
    name: str


class Pool(Protocol):
    """Counts references to blocks; a block without any may be reused."""

    def refer(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""

    def give_up(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Those last in order are the first to be reused."""

    def references_to(self, block: int) -> int:
        """How many a block has, of leases and others together."""


@dataclass
class _Lease:
    blocks: tuple[int, ...]
    until: float


class Leases:
    """The leases on one pool.

    Invariants: a block of a lease has a reference of its own for each lease that names it; a lease ends when it is
    told to, or by `expire` once its time is over, and never before; no more than `most_blocks` different blocks are in
    pins and holds.

    Both `expire` and `kept` are called with every engine step: they cost as much as has changed since, however many
    blocks are in leases.
    """

    def __init__(self, pool: Pool, most_blocks: int, most_leases: int = MOST_LEASES) -> None:
        self._pool = pool
        self._most_blocks = most_blocks
        self._most_leases = most_leases
        self._leases: dict[Key, _Lease] = {}
        self._references: Counter[int] = Counter()
        self._ends: list[tuple[float, Key]] = []
        """A heap. A lease that was ended before its time stays in it until then."""
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
        """Every block in a lease, and how many leases it is in."""
        return self._references

    @property
    def next_end(self) -> float:
        """When `expire` has something to do, at the earliest. Infinite without leases."""
        return self._ends[0][0] if self._ends else math.inf

    def note(self, blocks: Iterable[int]) -> None:
        """Somebody else has taken or given up references to these."""
        self._changed.update(block for block in blocks if block in self._references)

    def kept(self) -> int:
        """How many blocks have no references but those of leases, provided that `note` was told of all others."""
        for block in self._changed:
            leases = self._references.get(block, 0)
            if leases and self._pool.references_to(block) == leases:
                self._kept.add(block)
            else:
                self._kept.discard(block)
        self._changed.clear()
        return len(self._kept)

    def take(self, key: Key, blocks: Sequence[int], until: float) -> str | None:
        """Start a lease, or say why not."""
        if key in self._leases:
            return "there is such a lease already"
        if len(self._leases) >= self._most_leases:
            return "there are too many leases"
        new = len(set(blocks) - self._references.keys())
        if len(self._references) + new > self._most_blocks:
            return f"{len(self._references)} of at most {self._most_blocks} blocks are kept for readers already"
        self._start(key, blocks, until)
        return None

    def strand(self, name: str, blocks: Sequence[int]) -> None:
        """Keep blocks out of use until `end`: something may still write to them. No limit can forbid that."""
        if Key("stray", name) not in self._leases:
            self._start(Key("stray", name), blocks, math.inf)

    def shrink(self, key: Key, count: int) -> None:
        """Let a lease keep its first `count` blocks only; without any it ends."""
        lease = self._leases[key]
        kept, rest = lease.blocks[:count], lease.blocks[count:]
        if not kept:
            self.end(key)
            return
        lease.blocks = kept
        self._free(rest)

    def blocks(self, key: Key) -> tuple[int, ...]:
        """Of a lease; empty once it has ended."""
        lease = self._leases.get(key)
        return () if lease is None else lease.blocks

    def end(self, key: Key) -> None:
        """End a lease at once. Unknown ones are ignored."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._free(lease.blocks)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            lease = self._leases.get(key)
            # There may be a later one of that name.
            if lease is not None and lease.until <= now:
                self.end(key)

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
